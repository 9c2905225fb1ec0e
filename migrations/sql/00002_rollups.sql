-- What history told, by time, source, life and tier: counted for times that have ended, and replaced as a whole. A row is counted again when
-- rows come late to its time, and the version, which grows with the writer's rounds, says which one is read: FINAL. Seconds are counted from
-- block_events, batches and loads, minutes from seconds, hours from minutes. How far they go is in progress, at the source 'rollups'.

-- +goose Up
-- +goose NO TRANSACTION

-- +goose StatementBegin
CREATE TABLE IF NOT EXISTS rollup_seconds
(
    bucket     DateTime('UTC') COMMENT 'when it begins' CODEC(Delta, ZSTD(1)),
    source     LowCardinality(String) CODEC(ZSTD(1)),
    epoch      UInt64 CODEC(ZSTD(1)),
    tier       LowCardinality(String) COMMENT 'empty for what has none' CODEC(ZSTD(1)),
    version    UInt64 CODEC(Delta, ZSTD(1)),
    blocks     UInt64 COMMENT 'rows of block_events' CODEC(T64, ZSTD(1)),
    stored     UInt64 COMMENT 'blocks that changed copies' CODEC(T64, ZSTD(1)),
    evicted    UInt64 COMMENT 'blocks that changed copies' CODEC(T64, ZSTD(1)),
    loaded     UInt64 COMMENT 'blocks' CODEC(T64, ZSTD(1)),
    cleared    UInt64 CODEC(T64, ZSTD(1)),
    ages       Map(UInt64, UInt64) COMMENT 'of evicted last copies in ms, rounded down to 8 binary digits and to the bounds of lifetimes: how many' CODEC(ZSTD(1)),
    first      DateTime('UTC') COMMENT 'of blocks; 1970 = none' CODEC(Delta, ZSTD(1)),
    last       DateTime('UTC') CODEC(Delta, ZSTD(1)),
    batches    UInt64 CODEC(T64, ZSTD(1)),
    sequences  UInt64 COMMENT 'of batches, but for those that were dropped' CODEC(T64, ZSTD(1)),
    lost       UInt64 COMMENT 'sequences' CODEC(T64, ZSTD(1)),
    loads      UInt64 CODEC(T64, ZSTD(1)),
    load_bytes UInt64 CODEC(T64, ZSTD(1)),
    load_us    UInt64 CODEC(T64, ZSTD(1))
)
ENGINE = ReplacingMergeTree(version)
PARTITION BY toDate(bucket)
ORDER BY (bucket, source, epoch, tier)
TTL toDate(bucket) + INTERVAL 30 DAY
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE TABLE IF NOT EXISTS rollup_minutes
(
    bucket     DateTime('UTC') COMMENT 'when it begins' CODEC(Delta, ZSTD(1)),
    source     LowCardinality(String) CODEC(ZSTD(1)),
    epoch      UInt64 CODEC(ZSTD(1)),
    tier       LowCardinality(String) COMMENT 'empty for what has none' CODEC(ZSTD(1)),
    version    UInt64 CODEC(Delta, ZSTD(1)),
    blocks     UInt64 COMMENT 'rows of block_events' CODEC(T64, ZSTD(1)),
    stored     UInt64 COMMENT 'blocks that changed copies' CODEC(T64, ZSTD(1)),
    evicted    UInt64 COMMENT 'blocks that changed copies' CODEC(T64, ZSTD(1)),
    loaded     UInt64 COMMENT 'blocks' CODEC(T64, ZSTD(1)),
    cleared    UInt64 CODEC(T64, ZSTD(1)),
    ages       Map(UInt64, UInt64) COMMENT 'of evicted last copies in ms, rounded down to 8 binary digits and to the bounds of lifetimes: how many' CODEC(ZSTD(1)),
    first      DateTime('UTC') COMMENT 'of blocks; 1970 = none' CODEC(Delta, ZSTD(1)),
    last       DateTime('UTC') CODEC(Delta, ZSTD(1)),
    batches    UInt64 CODEC(T64, ZSTD(1)),
    sequences  UInt64 COMMENT 'of batches, but for those that were dropped' CODEC(T64, ZSTD(1)),
    lost       UInt64 COMMENT 'sequences' CODEC(T64, ZSTD(1)),
    loads      UInt64 CODEC(T64, ZSTD(1)),
    load_bytes UInt64 CODEC(T64, ZSTD(1)),
    load_us    UInt64 CODEC(T64, ZSTD(1))
)
ENGINE = ReplacingMergeTree(version)
PARTITION BY toDate(bucket)
ORDER BY (bucket, source, epoch, tier)
TTL toDate(bucket) + INTERVAL 30 DAY
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE TABLE IF NOT EXISTS rollup_hours
(
    bucket     DateTime('UTC') COMMENT 'when it begins' CODEC(Delta, ZSTD(1)),
    source     LowCardinality(String) CODEC(ZSTD(1)),
    epoch      UInt64 CODEC(ZSTD(1)),
    tier       LowCardinality(String) COMMENT 'empty for what has none' CODEC(ZSTD(1)),
    version    UInt64 CODEC(Delta, ZSTD(1)),
    blocks     UInt64 COMMENT 'rows of block_events' CODEC(T64, ZSTD(1)),
    stored     UInt64 COMMENT 'blocks that changed copies' CODEC(T64, ZSTD(1)),
    evicted    UInt64 COMMENT 'blocks that changed copies' CODEC(T64, ZSTD(1)),
    loaded     UInt64 COMMENT 'blocks' CODEC(T64, ZSTD(1)),
    cleared    UInt64 CODEC(T64, ZSTD(1)),
    ages       Map(UInt64, UInt64) COMMENT 'of evicted last copies in ms, rounded down to 8 binary digits and to the bounds of lifetimes: how many' CODEC(ZSTD(1)),
    first      DateTime('UTC') COMMENT 'of blocks; 1970 = none' CODEC(Delta, ZSTD(1)),
    last       DateTime('UTC') CODEC(Delta, ZSTD(1)),
    batches    UInt64 CODEC(T64, ZSTD(1)),
    sequences  UInt64 COMMENT 'of batches, but for those that were dropped' CODEC(T64, ZSTD(1)),
    lost       UInt64 COMMENT 'sequences' CODEC(T64, ZSTD(1)),
    loads      UInt64 CODEC(T64, ZSTD(1)),
    load_bytes UInt64 CODEC(T64, ZSTD(1)),
    load_us    UInt64 CODEC(T64, ZSTD(1))
)
ENGINE = ReplacingMergeTree(version)
PARTITION BY toDate(bucket)
ORDER BY (bucket, source, epoch, tier)
TTL toDate(bucket) + INTERVAL 30 DAY
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000;
-- +goose StatementEnd

-- +goose Down
-- +goose NO TRANSACTION
DROP TABLE IF EXISTS rollup_hours;
DROP TABLE IF EXISTS rollup_minutes;
DROP TABLE IF EXISTS rollup_seconds;
