# syntax=docker/dockerfile:1
# kvstrata in an image: docs/deploy.md says how it is used.

# 1 adds the embedded ClickHouse engine, 540 MB; docker-compose.yml has a ClickHouse of its own.
ARG WITH_EMBEDDED=0

FROM node:22-bookworm-slim AS ui
WORKDIR /src/web/ui
COPY web/ui/package.json web/ui/package-lock.json ./
RUN npm ci --no-audit --no-fund
COPY web/ui ./
RUN npm run build

FROM golang:1.26-bookworm AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends libzmq3-dev pkg-config \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
COPY --from=ui /src/web/ui/dist web/ui/dist
ARG VERSION=devel
RUN CGO_ENABLED=1 go build -trimpath -ldflags "-s -w -X main.version=${VERSION}" -o /out/kvstrata ./cmd/kvstrata

FROM debian:bookworm-slim AS embedded-0
RUN mkdir /out

FROM node:22-bookworm-slim AS embedded-1
WORKDIR /src
COPY indexer/history/embedded/package.json indexer/history/embedded/package-lock.json ./
RUN npm ci --no-audit --no-fund && mkdir /out && mv node_modules/@chdb/lib-linux-*-gnu/libchdb.so /out/

FROM embedded-${WITH_EMBEDDED} AS embedded

FROM debian:bookworm-slim AS image
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates libzmq5 \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --system --gid 10001 kvstrata \
 && useradd --system --uid 10001 --gid kvstrata --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin kvstrata \
 && install -d -o kvstrata -g kvstrata -m 0700 /data
# The engine is found beside the binary.
COPY --from=embedded /out/ /usr/local/bin/
COPY --from=build /out/kvstrata /usr/local/bin/kvstrata
USER 10001:10001
WORKDIR /
# Only roles that embed NATS or ClickHouse write there.
ENV KVSTRATA_DATA=/data
EXPOSE 8080
# Whether it lives, since some orchestrators replace what is unhealthy; docker-compose.yml asks whether it is ready.
HEALTHCHECK --interval=15s --timeout=5s --start-period=30s --retries=3 CMD ["kvstrata", "healthcheck", "--alive"]
ENTRYPOINT ["kvstrata"]
CMD ["--help"]
