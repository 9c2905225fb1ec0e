package main

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"time"

	"kvstrata/indexer/history/archive"
	"kvstrata/subscriber"
)

// importFile is a file whose form is known.
type importFile struct {
	path     string
	form     fileForm
	packed   bool // with gzip
	size     int64
	modified time.Time
	sum      string // its digest, in hexadecimal
}

// fileForm is what a file is.
type fileForm uint8

const (
	unknownFile fileForm = iota
	rowLines
	rowParquet
	recordingFile
)

// sniffed is how much of a file is looked at to find out what it is: its first lines may be broken.
const sniffed = 100

var errUnknownFile = errors.New("neither an export of kvstrata (jsonl, parquet), nor a file of Dynamo's recorder, nor frames of an engine: docs/files.md")

// recognise finds out what a file is, by what it holds.
func recognise(path string) (f importFile, err error) {
	f.path = path
	file, err := os.Open(path)
	if err != nil {
		return f, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return f, err
	}
	if !info.Mode().IsRegular() {
		return f, errors.New("not a file that can be read twice")
	}
	f.size, f.modified = info.Size(), info.ModTime()
	begin := make([]byte, 4)
	n, err := io.ReadFull(file, begin)
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
		return f, errUnknownFile
	}
	if begin = begin[:n]; archive.IsParquet(begin) {
		f.form = rowParquet
		return f, nil
	}
	f.packed = bytes.HasPrefix(begin, []byte{0x1f, 0x8b})
	in, err := f.open()
	if err != nil {
		return f, err
	}
	defer in.Close()
	lines := archive.NewLines(in)
	for range sniffed {
		line, err := lines.Next()
		switch {
		case errors.As(err, new(*archive.BadRow)):
			continue
		case errors.Is(err, io.EOF):
			return f, errUnknownFile
		case err != nil:
			return f, err
		case archive.IsHead(line):
			f.form = rowLines
			return f, nil
		}
		if _, err := subscriber.ReadHeard(line); err == nil {
			f.form = recordingFile
			return f, nil
		}
	}
	return f, errUnknownFile
}

// unpacked is a file that is unpacked while it is read.
type unpacked struct {
	*gzip.Reader
	file *os.File
}

func (u unpacked) Close() error { return errors.Join(u.Reader.Close(), u.file.Close()) }

// open opens a file of lines.
func (f *importFile) open() (io.ReadCloser, error) {
	file, err := os.Open(f.path)
	if err != nil || !f.packed {
		return file, err
	}
	r, err := gzip.NewReader(file)
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return unpacked{r, file}, nil
}

// digest reads the file's digest.
func (f *importFile) digest() error {
	file, err := os.Open(f.path)
	if err != nil {
		return err
	}
	defer file.Close()
	h := sha256.New()
	if _, err := io.Copy(h, file); err != nil {
		return err
	}
	f.sum = hex.EncodeToString(h.Sum(nil))
	return nil
}

// rowReader reads rows of a file.
type rowReader interface{ Next() (archive.Row, error) }

// rows opens a file of rows.
func (f *importFile) rows(tables archive.Tables) (r rowReader, done func() error, err error) {
	if f.form == rowParquet {
		file, err := os.Open(f.path)
		if err != nil {
			return nil, nil, err
		}
		p, err := archive.NewParquetReader(file, f.size, tables)
		if err != nil {
			return nil, nil, errors.Join(err, file.Close())
		}
		return p, func() error { p.Close(); return file.Close() }, nil
	}
	in, err := f.open()
	if err != nil {
		return nil, nil, err
	}
	l, err := archive.NewLineReader(in, tables)
	if err != nil {
		return nil, nil, errors.Join(err, in.Close())
	}
	return l, in.Close, nil
}
