const first = 500;
const longest = 20_000;

/**
 * Milliseconds to wait before the nth try in a row (0: the first). It doubles up to 20 s; half of it is random, so that a
 * restarted server does not get all its dashboards in the same instant.
 */
export function backoff(attempt: number, random: () => number): number {
  const ceiling = Math.min(longest, first * 2 ** Math.min(attempt, 16));
  return Math.round(ceiling / 2 + (ceiling / 2) * random());
}
