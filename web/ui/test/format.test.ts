import { describe, expect, it } from "vitest";
import { bytes, count, duration, lag, percent, plural, rate, short, shortHash, terse } from "../src/format";

const plain = (text: string) => text.replaceAll("\u00a0", " ");

describe("format", () => {
  it.each([
    [0, "0"],
    [99_999, "99,999"],
    [100_000, "100 k"],
    [999_499, "999 k"],
    [999_600, "1.00 M"],
    [12_345_678, "12.3 M"],
    [123_456_789, "123 M"],
    [-2_500_000_000, "-2.50 G"],
  ])("short %d", (n, text) => expect(plain(short(n))).toBe(text));

  it.each([
    [0, "0"],
    [0.04, "< 0.1"],
    [9.94, "9.9"],
    [41.6, "42"],
    [1_234.4, "1,234"],
  ])("rate %d", (n, text) => expect(plain(rate(n))).toBe(text));

  it.each([
    [0, "0 %"],
    [0.0004, "< 0.1 %"],
    [0.6344, "63.4 %"],
    [0.99951, "> 99.9 %"],
    [1, "100 %"],
    [Number.NaN, "–"],
  ])("percent %d", (n, text) => expect(plain(percent(n))).toBe(text));

  it.each([
    [0.25, "250 µs"],
    [7.1, "7.1 ms"],
    [143.4, "143 ms"],
    [2400, "2.4 s"],
    [61_000, "1 min 1 s"],
  ])("lag %d", (n, text) => expect(plain(lag(n))).toBe(text));

  it.each([
    [-3, "0 s"],
    [0.02, "20 ms"],
    [12.9, "12 s"],
    [59.99, "59 s"],
    [60, "1 min"],
    [3599, "59 min 59 s"],
    [7500, "2 h 5 min"],
    [90_000, "1 d 1 h"],
  ])("duration %d", (n, text) => expect(plain(duration(n))).toBe(text));

  it.each([
    [0, "0 B"],
    [1023, "1,023 B"],
    [2_097_152, "2.0 MiB"],
    [1.5 * 1024 ** 4, "1.5 TiB"],
  ])("bytes %d", (n, text) => expect(plain(bytes(n))).toBe(text));

  it("says counts and hashes", () => {
    expect(count(1_234_567)).toBe("1,234,567");
    expect(plain(terse(16_384))).toBe("16 k");
    expect(plain(plural(1, "batch", "batches"))).toBe("1 batch");
    expect(plain(plural(2, "batch", "batches"))).toBe("2 batches");
    expect(shortHash("34dc6330fee229a2")).toBe("34dc6330fee229a2");
    expect(shortHash("34dc6330fee229a2ff")).toBe("34dc6330fee229a2…");
  });
});
