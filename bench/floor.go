package main

import (
	"fmt"
	"io"
	"runtime"
	"text/tabwriter"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"kvstrata/bench/workload"
)

// printFloor measures what every structure pays for on this machine: a read that misses the caches, alone and beside others that do
// not depend on it, and the same of a bare table.
func printFloor(w io.Writer) error {
	t := tabwriter.NewWriter(w, 2, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "%s\n\n", machine())
	fmt.Fprintln(t, "TABLE\tPAGES\tREAD after READ, ns\tREADS in 8s, ns\tREADS in 32s, ns\tBANDWIDTH, GB/s\t")
	for _, size := range []int{16 << 20, 64 << 20, 256 << 20, 1 << 30} {
		for _, huge := range []bool{false, true} {
			m, err := mapped(size, huge)
			if err != nil {
				return err
			}
			fmt.Fprintf(t, "%d MiB\t%s\t%.1f\t%.1f\t%.1f\t%.1f\t\n", size>>20, pages(huge),
				chased(m), batched(m, 8), batched(m, 32), bandwidth(m))
			if err := release(m); err != nil {
				return err
			}
		}
	}
	fmt.Fprintln(t, "\t\t\t\t\t\t")
	fmt.Fprintln(t, "BARE TABLE\tPAGES\tINSERT + DELETE, ns\tTOUCHED AHEAD, ns\t\t\t")
	for _, entries := range []int{1 << 20, 8 << 20} {
		for _, huge := range []bool{false, true} {
			plain, err := bareTable(entries, huge, 1)
			if err != nil {
				return err
			}
			ahead, err := bareTable(entries, huge, 32)
			if err != nil {
				return err
			}
			fmt.Fprintf(t, "%d entries\t%s\t%.1f\t%.1f\t\t\t\n", entries, pages(huge), plain, ahead)
		}
	}
	fmt.Fprint(io.Discard, sink)
	return t.Flush()
}

func pages(huge bool) string {
	if huge {
		return "huge"
	}
	return "4 KiB"
}

// mapped returns zeroed memory whose pages are there.
func mapped(size int, huge bool) ([]uint64, error) {
	m, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", size, err)
	}
	advice := unix.MADV_NOHUGEPAGE
	if huge {
		advice = unix.MADV_HUGEPAGE
	}
	if err := unix.Madvise(m, advice); err != nil {
		return nil, fmt.Errorf("advise on pages: %w", err)
	}
	words := unsafe.Slice((*uint64)(unsafe.Pointer(&m[0])), size/8)
	for i := range words {
		words[i] = workload.Mix(uint64(i))
	}
	return words, nil
}

func release(m []uint64) error {
	return unix.Munmap(unsafe.Slice((*byte)(unsafe.Pointer(&m[0])), 8*len(m)))
}

const floorReads = 4 << 20

// sink keeps what was read from being left out.
var sink uint64

// chased reads at places of which each follows from what was read before.
func chased(m []uint64) float64 {
	mask, at, began := uint64(len(m)-1), uint64(1), time.Now()
	for i := range uint64(floorReads) {
		at = workload.Mix(m[at]+i) & mask
	}
	sink += at
	return float64(time.Since(began).Nanoseconds()) / floorReads
}

// batched reads at n places that are known together, then knows the next n.
func batched(m []uint64, n int) float64 {
	mask, seed, began := uint64(len(m)-1), uint64(1), time.Now()
	for range floorReads / n {
		var sum uint64
		for i := range uint64(n) {
			sum += m[workload.Mix(seed+i)&mask]
		}
		seed += sum | 1
	}
	sink += seed
	return float64(time.Since(began).Nanoseconds()) / floorReads
}

func bandwidth(m []uint64) float64 {
	began := time.Now()
	var sum uint64
	for range 2 {
		for i := 0; i < len(m); i += 4 {
			sum += m[i] + m[i+1] + m[i+2] + m[i+3]
		}
	}
	sink += sum
	return 2 * 8 * float64(len(m)) / float64(time.Since(began).Nanoseconds())
}

// bareTable returns what one insertion and one deletion take in an open-addressing table of 16-byte slots at half load that
// holds so many entries, in batches of which all home slots are read first.
func bareTable(entries int, huge bool, batch int) (float64, error) {
	m, err := mapped(entries*4*8, huge)
	if err != nil {
		return 0, err
	}
	defer release(m)
	clear(m)
	t := table{slots: m, mask: uint64(len(m)/2 - 1)}
	for i := range entries {
		t.insert(workload.Mix(uint64(i) + 1))
	}
	runtime.GC()
	rounds := (1 << 21) / batch
	began := time.Now()
	next := uint64(entries)
	for range rounds {
		if batch > 1 {
			for i := range uint64(batch) {
				sink += m[workload.Mix(next+i+1)&t.mask*2] + m[workload.Mix(next+i+1-uint64(entries))&t.mask*2]
			}
		}
		for range batch {
			t.insert(workload.Mix(next + 1))
			t.remove(workload.Mix(next + 1 - uint64(entries)))
			next++
		}
	}
	return float64(time.Since(began).Nanoseconds()) / float64(rounds*batch), nil
}

// table has keys that are not 0, each beside a value, at the first free place from its home on.
type table struct {
	slots []uint64
	mask  uint64
}

func (t *table) insert(key uint64) {
	at := key & t.mask
	for t.slots[2*at] != 0 {
		at = (at + 1) & t.mask
	}
	t.slots[2*at], t.slots[2*at+1] = key, 1
}

// remove moves back whoever stands behind the gap and would not be found across it.
func (t *table) remove(key uint64) {
	gap := key & t.mask
	for t.slots[2*gap] != key {
		gap = (gap + 1) & t.mask
	}
	for at := (gap + 1) & t.mask; t.slots[2*at] != 0; at = (at + 1) & t.mask {
		if home := t.slots[2*at] & t.mask; (at-home)&t.mask >= (at-gap)&t.mask {
			t.slots[2*gap], t.slots[2*gap+1] = t.slots[2*at], t.slots[2*at+1]
			gap = at
		}
	}
	t.slots[2*gap], t.slots[2*gap+1] = 0, 0
}
