package lmcache

import (
	"fmt"
	"slices"
	"strings"
)

// DType is an element type by LMCache's number on the wire (lmcache/v1/protocol.py, DTYPE_TO_INT).
type DType int32

// The element types. Half is a second number for Float16: LMCache reads both and writes Float16.
const (
	NoDType DType = iota
	Half
	Float16
	BFloat16
	Float32
	Float64
	Uint8
	FP8E4M3
	FP8E5M2
)

// dtypes are LMCache's words for element types in keys (lmcache/utils.py, TORCH_DTYPE_TO_STR_DTYPE), and their bytes.
var dtypes = []struct {
	key   string
	bytes int
	names []string // in engines' and torch's spelling
}{
	NoDType:  {},
	Half:     {"half", 2, nil},
	Float16:  {"half", 2, []string{"float16", "half", "fp16"}},
	BFloat16: {"bfloat16", 2, []string{"bfloat16", "bf16"}},
	Float32:  {"float", 4, []string{"float32", "float", "fp32"}},
	Float64:  {"double", 8, []string{"float64", "double"}},
	// vLLM keeps its fp8 caches in tensors of uint8, and LMCache goes by the tensor.
	Uint8:   {"uint8", 1, []string{"uint8", "fp8", "fp8_e4m3", "fp8_e5m2"}},
	FP8E4M3: {"fp8_e4m3fn", 1, []string{"float8_e4m3fn", "fp8_e4m3fn"}},
	FP8E5M2: {"fp8_e5m2", 1, []string{"float8_e5m2"}},
}

// ParseDType reads the name that an engine or torch has for an element type, with or without "torch.".
func ParseDType(name string) (DType, error) {
	short := strings.ToLower(strings.TrimPrefix(name, "torch."))
	for d := range dtypes {
		if slices.Contains(dtypes[d].names, short) {
			return DType(d), nil
		}
	}
	return 0, fmt.Errorf("element type %q: LMCache has no number for it; want float16, bfloat16, float32, float64, uint8, fp8, float8_e4m3fn or float8_e5m2", name)
}

// Valid reports whether LMCache knows the number.
func (d DType) Valid() bool { return d >= NoDType && d <= FP8E5M2 }

// Bytes returns the bytes of an element; 0 for none.
func (d DType) Bytes() int {
	if !d.Valid() {
		return 0
	}
	return dtypes[d].bytes
}

// String returns the word that stands in keys.
func (d DType) String() string {
	if !d.Valid() {
		return fmt.Sprintf("DType(%d)", int32(d))
	}
	return dtypes[d].key
}

// same reports whether two numbers name one type.
func (d DType) same(other DType) bool {
	if d == Half {
		d = Float16
	}
	if other == Half {
		other = Float16
	}
	return d == other
}

// Format is how a value's bytes are ordered, by LMCache's number (lmcache/v1/memory_management.py, MemoryFormat).
type Format int32

// The formats: 2 = keys and values, L layers, T tokens, D elements of all heads of a token.
const (
	UndefinedFormat Format = iota
	KV2LTD                 // [2, L, T, D]
	KVT2D                  // [T, 2, D]
	KV2TD                  // [2, T, D]
	Binary                 // compressed
	BinaryBuffer           // bytes
	KVMLA                  // [1, L, T, D]
	EncoderTD              // [T, D] of an encoder cache
	HiddenTD               // [T, D] of hidden states
)

var formatNames = []string{
	UndefinedFormat: "UNDEFINED", KV2LTD: "KV_2LTD", KVT2D: "KV_T2D", KV2TD: "KV_2TD", Binary: "BINARY", BinaryBuffer: "BINARY_BUFFER",
	KVMLA: "KV_MLA_FMT", EncoderTD: "EC_TD", HiddenTD: "HS_TD",
}

// Valid reports whether LMCache knows the number.
func (f Format) Valid() bool { return f >= UndefinedFormat && f <= HiddenTD }

// String returns LMCache's name.
func (f Format) String() string {
	if !f.Valid() {
		return fmt.Sprintf("Format(%d)", int32(f))
	}
	return formatNames[f]
}
