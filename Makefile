# What CI runs and what people run are the same targets. Each does all its own set-up.

GO      ?= go
VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
TRACES  := $(wildcard ../shared/data)
export KVSTRATA_TRACES ?= $(if $(TRACES),$(abspath $(TRACES)))

.PHONY: help setup setup-test build demo test race ui-test trace lint generate fuzz interop interop-vllm chaos bench bench-index clean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Install what is missing: Debian packages, the ClickHouse engine, the dashboard's libraries.
	@./scripts/setup.sh

setup-test: # and what only tests need
	@./scripts/setup.sh test

UI := $(shell find web/ui -path web/ui/node_modules -prune -o -path web/ui/dist -prune -o -type f -print)
web/ui/dist/index.html: $(UI)
	cd web/ui && npm run build --silent
	@touch $@

build: setup ## Build the dashboard and bin/kvstrata.
	@$(MAKE) --no-print-directory web/ui/dist/index.html
	$(GO) build -ldflags "-X main.version=$(VERSION)" -o bin/kvstrata ./cmd/kvstrata

demo: build ## Run everything here, with simulated engines.
	bin/kvstrata demo

test: setup-test build lint ui-test race trace ## Run all tests but interop.

ui-test: setup # the dashboard's own tests
	cd web/ui && npm run lint --silent && npm test --silent

race: setup-test # every test but those of real engines, with the race detector
	$(GO) test -race -short -shuffle=on -timeout 15m $$($(GO) list ./... | grep -v /interop)
	cd bench && $(GO) test -race -shuffle=on -timeout 5m ./...

trace: setup # the real traces, without the race detector: they are long
	$(GO) test -shuffle=on -timeout 10m -run 'Trace' ./sim ./indexer/history/capacity ./cmd/kvstrata

lint: setup ## Vet, staticcheck and gofumpt.
	$(GO) vet ./...
	$(GO) run honnef.co/go/tools/cmd/staticcheck@v0.8.2 ./...
	cd bench && $(GO) vet ./... && $(GO) run honnef.co/go/tools/cmd/staticcheck@v0.8.2 ./...
	@unformatted=$$($(GO) run mvdan.cc/gofumpt@v0.12.0 -l $$(git ls-files '*.go' | grep -v '\.pb\.go$$')); \
	if [ -n "$$unformatted" ]; then echo "not gofumpt-ed:"; echo "$$unformatted"; exit 1; fi

generate: ## Make event/eventpb, indexer/prefix/prefixpb and llmdpb anew (needs protoc).
	$(GO) build -o bin/protoc-gen-go google.golang.org/protobuf/cmd/protoc-gen-go
	$(GO) build -o bin/protoc-gen-go-grpc google.golang.org/grpc/cmd/protoc-gen-go-grpc
	PATH="$(CURDIR)/bin:$$PATH" protoc --go_out=. --go_opt=module=kvstrata event/eventpb/event.proto
	PATH="$(CURDIR)/bin:$$PATH" protoc --go_out=. --go_opt=module=kvstrata --go-grpc_out=. --go-grpc_opt=module=kvstrata indexer/prefix/prefixpb/index.proto
	PATH="$(CURDIR)/bin:$$PATH" protoc --go_out=. --go_opt=module=kvstrata --go-grpc_out=. --go-grpc_opt=module=kvstrata indexer/prefix/llmdpb/indexer.proto

FUZZTIME ?= 30s
fuzz: setup ## Fuzz every decoder for FUZZTIME each.
	@./scripts/fuzz.sh $(FUZZTIME)

interop-vllm: setup-test ## Check against whole vLLM engines, on the CPU (installs 5 GB).
	interop/engine.sh

interop: setup-test ## Check against vLLM's and LMCache's own code (installed in Python environments).
	interop/check.sh

CHAOSTIME ?= 60s
CHAOSSEED ?= 0
chaos: build ## Kill, stop and cut off real processes at random for CHAOSTIME, and compare (docs/chaos.md).
	$(GO) build -o bin/chaos ./chaos
	bin/chaos --time $(CHAOSTIME) --seed $(CHAOSSEED)

bench: build ## Measure the pipeline.
	bin/kvstrata bench pipeline --batch 16
	bin/kvstrata bench pipeline --batch 256

bench-index: setup ## Measure the prefix index beside its peers on the same work (BENCH=--smoke, --growth, --floor).
	cd bench && $(GO) build -o ../bin/bench-index . && ../bin/bench-index $(BENCH)

clean:
	rm -rf bin interop/.venv
