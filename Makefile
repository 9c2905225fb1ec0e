# What CI runs and what people run are the same targets. Each does all its own set-up.

GO      ?= go
VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
TRACES  := $(wildcard ../shared/data)
export KVSTRATA_TRACES ?= $(if $(TRACES),$(abspath $(TRACES)))

.PHONY: help setup build demo test race trace lint generate fuzz interop bench clean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Install what is missing: libzmq and pkg-config (Debian packages).
	@./scripts/setup.sh

build: setup ## Build bin/kvstrata.
	$(GO) build -ldflags "-X main.version=$(VERSION)" -o bin/kvstrata ./cmd/kvstrata

demo: build ## Run everything here, with simulated engines.
	bin/kvstrata demo

test: build lint race trace ## Run all tests but interop.

race: setup # every test but those of real engines, with the race detector
	$(GO) test -race -short -shuffle=on -timeout 15m $$($(GO) list ./... | grep -v /interop)

trace: setup # the real traces, without the race detector: they are long
	$(GO) test -shuffle=on -timeout 10m -run 'Trace' ./sim ./cmd/kvstrata

lint: setup ## Vet, staticcheck and gofumpt.
	$(GO) vet ./...
	$(GO) run honnef.co/go/tools/cmd/staticcheck@v0.8.2 ./...
	@unformatted=$$($(GO) run mvdan.cc/gofumpt@v0.12.0 -l $$(git ls-files '*.go' | grep -v '\.pb\.go$$')); \
	if [ -n "$$unformatted" ]; then echo "not gofumpt-ed:"; echo "$$unformatted"; exit 1; fi

generate: ## Make event/eventpb anew (needs protoc).
	$(GO) build -o bin/protoc-gen-go google.golang.org/protobuf/cmd/protoc-gen-go
	PATH="$(CURDIR)/bin:$$PATH" protoc --go_out=. --go_opt=module=kvstrata event/eventpb/event.proto

FUZZTIME ?= 30s
fuzz: setup ## Fuzz every decoder for FUZZTIME each.
	@./scripts/fuzz.sh $(FUZZTIME)

interop: setup ## Check against vLLM's own classes (installs them in a Python environment).
	interop/check.sh

bench: build ## Measure the pipeline.
	bin/kvstrata bench pipeline --batch 16
	bin/kvstrata bench pipeline --batch 256

clean:
	rm -rf bin interop/.venv
