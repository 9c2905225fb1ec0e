package main

import "kvstrata/indexer/prefix/llmd"

// tokenizerFlag says who makes tokens of the prompts that llm-d's clients send as text.
type tokenizerFlag struct {
	Tokenizer string `help:"Address of an engine's API, whose POST /tokenize (vLLM's) makes tokens of the prompts that clients of llm-d's IndexerService send; needs --grpc. Empty: that service refuses." placeholder:"URL" env:"KVSTRATA_TOKENIZER"`
}

// addTokenizer must come before listen.
func (s *stack) addTokenizer(flag tokenizerFlag, others listenFlags) error {
	if flag.Tokenizer == "" {
		return nil
	}
	if others.GRPC == "" {
		return usagef("--tokenizer: prompts as text come over gRPC only; give --grpc")
	}
	t, err := llmd.NewTokenizer(flag.Tokenizer)
	if err != nil {
		return usagef("--tokenizer: %w", err)
	}
	s.tokenizer = t
	return nil
}

// tokenize is the tokenizer's call, nil without --tokenizer.
func (s *stack) tokenize() llmd.Tokenize {
	if s.tokenizer == nil {
		return nil
	}
	return s.tokenizer.Tokenize
}
