package main

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"os"

	"kvstrata/bench/workload"
	"kvstrata/event"
)

// workFile writes work for peers; dynamo/src/main.rs has the layout.
type workFile struct {
	file *os.File
	out  *bufio.Writer
	buf  []byte
}

const (
	recordQuery = 1 + iota
	recordStored
	recordRemoved
	recordMessage
)

func newWorkFile(path string) (*workFile, error) {
	file, err := os.Create(path)
	if err != nil {
		return nil, fmt.Errorf("write work for Dynamo: %w", err)
	}
	return &workFile{file: file, out: bufio.NewWriterSize(file, 1<<20)}, nil
}

func (w *workFile) header(kind, worker int, millis int64, n int, hasParent bool, parent uint64) {
	b := binary.LittleEndian.AppendUint32(w.buf[:0], uint32(kind))
	b = binary.LittleEndian.AppendUint32(b, uint32(worker))
	b = binary.LittleEndian.AppendUint64(b, uint64(millis))
	b = binary.LittleEndian.AppendUint32(b, uint32(n))
	has := uint32(0)
	if hasParent {
		has = 1
	}
	b = binary.LittleEndian.AppendUint32(b, has)
	w.buf = binary.LittleEndian.AppendUint64(b, parent)
}

func (w *workFile) add(v uint64) { w.buf = binary.LittleEndian.AppendUint64(w.buf, v) }

// flush hands the record to the writer, whose first error close returns.
func (w *workFile) flush() { w.out.Write(w.buf) }

func (w *workFile) close() error {
	if err := w.out.Flush(); err != nil {
		return fmt.Errorf("write work for Dynamo: %w", err)
	}
	return w.file.Close()
}

// query writes a prompt as local hashes.
func (w *workFile) query(worker int, millis int64, locals []uint64) {
	w.header(recordQuery, worker, millis, len(locals), false, 0)
	for _, l := range locals {
		w.add(l)
	}
	w.flush()
}

// trace writes work 1, in the order in which newCorpus has it.
func (w *workFile) trace(t *workload.Trace, copies int) {
	steps := t.Steps(workload.WorkersPerCopy, workload.PoolBlocks)
	names := make([]*workload.Names, copies)
	for i := range names {
		names[i] = t.Names(i)
	}
	var locals []uint64
	for k := range steps {
		r := &t.Requests[k]
		for _, nm := range names { // at equal times queries stand before writes
			locals = locals[:0]
			for j := range r.Len() {
				locals = append(locals, nm.Local[r.Block(j)])
			}
			w.query(0, r.Millis, locals)
		}
		for i, nm := range names {
			w.step(r, &steps[k], nm, i*workload.WorkersPerCopy+steps[k].Worker)
		}
	}
}

func (w *workFile) step(r *workload.TraceRequest, s *workload.Step, nm *workload.Names, worker int) {
	if len(s.Removed) > 0 {
		w.header(recordRemoved, worker, r.Millis, len(s.Removed), false, 0)
		for _, b := range s.Removed {
			w.add(nm.Engine(b))
		}
		w.flush()
	}
	for _, run := range s.Stored {
		parent := uint64(0)
		if run.First > 0 {
			parent = nm.Engine(r.Block(run.First - 1))
		}
		w.header(recordStored, worker, r.Millis, run.Blocks, run.First > 0, parent)
		for i := range run.Blocks {
			b := r.Block(run.First + i)
			w.add(nm.Engine(b))
			w.add(nm.Local[b])
		}
		w.flush()
	}
}

// messages writes work 2.
func (w *workFile) messages(payloads []workload.Payload) {
	for i := range payloads {
		p := &payloads[i]
		w.header(recordMessage, p.Pod, 0, len(p.Data), false, 0)
		w.buf = append(w.buf, p.Data...)
		for len(w.buf)%8 != 0 {
			w.buf = append(w.buf, 0)
		}
		w.flush()
	}
}

// fill writes work 3.
func (w *workFile) fill(shared int) {
	workers := max(shared, 16)
	random := workload.NewRandom(7)
	var locals [fillRun]uint64
	for entries, run := 0, 0; entries < fillTo; run++ {
		for i := range locals {
			locals[i] = random.Next()
		}
		for s := range shared {
			w.header(recordStored, (run+s)%workers, 0, fillRun, false, 0)
			for _, l := range locals {
				w.add(random.Next())
				w.add(l)
			}
			w.flush()
			entries += fillRun
		}
	}
}

// lookups writes work 4: the prompts that workers hold, then the questions.
func (w *workFile) lookups(workers int) {
	random := workload.NewRandom(11)
	lists := [][]prompt{newPrompts(1), newPrompts(2), newPrompts(3)}
	for kind, list := range lists {
		for i := range list {
			locals := make([]uint64, promptBlocks)
			for j := range locals {
				locals[j] = event.LocalHash(list[i].tokens[j*blockSize:(j+1)*blockSize], event.Hasher{}.Seed("", ""))
			}
			for worker := range workers {
				n := [...]int{promptBlocks, promptBlocks * (worker + 1) / workers, 0}[kind]
				if n == 0 {
					continue
				}
				w.header(recordStored, worker, 0, n, false, 0)
				for _, l := range locals[:n] {
					w.add(random.Next())
					w.add(l)
				}
				w.flush()
			}
			w.query(kind, 0, locals)
		}
	}
}
