package subscriber

import "kvstrata/event"

// field is a field of a batch or an event.
type field uint8

const (
	noField field = iota
	batchTime
	batchEvents
	batchRank
	eventTag
	blockHashes
	parentHash
	tokenIDs
	blockSize
	loraID
	medium
	loraName
	extraKeys
	groupIndex
	specKind
	slidingWindow
	locality
	ownership
	sessionID
	cacheSalt
)

// fieldNames are the names in vLLM's classes and, for cache_salt, in SGLang's.
var fieldNames = [...]string{
	batchTime: "ts", batchEvents: "events", batchRank: "data_parallel_rank", eventTag: "type",
	blockHashes: "block_hashes", parentHash: "parent_block_hash", tokenIDs: "token_ids", blockSize: "block_size",
	loraID: "lora_id", medium: "medium", loraName: "lora_name", extraKeys: "extra_keys", groupIndex: "group_idx",
	specKind: "kv_cache_spec_kind", slidingWindow: "kv_cache_spec_sliding_window", locality: "locality",
	ownership: "ownership", sessionID: "session_id", cacheSalt: "cache_salt",
}

// fieldOf returns the field that a map's key names.
func fieldOf(key []byte) field {
	switch string(key) {
	case "type":
		return eventTag
	case "block_hashes":
		return blockHashes
	case "parent_block_hash":
		return parentHash
	case "token_ids":
		return tokenIDs
	case "block_size":
		return blockSize
	case "lora_id":
		return loraID
	case "medium":
		return medium
	case "lora_name":
		return loraName
	case "extra_keys", "mm_keys": // TensorRT-LLM's
		return extraKeys
	case "group_idx":
		return groupIndex
	case "kv_cache_spec_kind":
		return specKind
	case "kv_cache_spec_sliding_window":
		return slidingWindow
	case "locality":
		return locality
	case "ownership":
		return ownership
	case "session_id":
		return sessionID
	case "cache_salt":
		return cacheSalt
	default:
		return noField
	}
}

// fieldSet is a set of fields.
type fieldSet uint32

func setOf(fields ...field) (s fieldSet) {
	for _, f := range fields {
		s |= 1 << f
	}
	return s
}

func (s fieldSet) has(f field) bool { return s>>f&1 != 0 }

// optional are the fields that nil leaves out.
var optional = ^setOf(blockHashes, tokenIDs, blockSize)

// class is one of vLLM's event classes.
type class struct {
	tag      string
	kind     event.Kind
	order    []field // of the array form, after the tag
	fields   fieldSet
	required int // how many of order must be there, the others have defaults or came later
}

var (
	storedClass = &class{
		tag: "BlockStored", kind: event.Stored, required: 4,
		order: []field{
			blockHashes, parentHash, tokenIDs, blockSize, loraID, medium, loraName, extraKeys, groupIndex, specKind,
			slidingWindow,
		},
		fields: setOf(
			blockHashes, parentHash, tokenIDs, blockSize, loraID, medium, loraName, extraKeys, groupIndex, specKind,
			slidingWindow, locality, ownership, sessionID, cacheSalt,
		),
	}
	removedClass = &class{
		tag: "BlockRemoved", kind: event.Evicted, required: 1,
		order:  []field{blockHashes, medium, groupIndex},
		fields: setOf(blockHashes, medium, groupIndex, locality, ownership),
	}
	clearedClass = &class{tag: "AllBlocksCleared", kind: event.Cleared}
)

// classOf returns the class that a tag names, nil when it is none of vLLM's.
func classOf(tag []byte) *class {
	switch string(tag) {
	case "BlockStored":
		return storedClass
	case "BlockRemoved":
		return removedClass
	case "AllBlocksCleared":
		return clearedClass
	default:
		return nil
	}
}
