-- Table partitions and TTL go by the day of `committed`, the time at which the bus took the message: engines' clocks can be
-- wrong. A source is spelled as in subjects (cluster.model.instance.rank.origin); the parts of its name are aliases.
-- Unknown values are 0 times, -1 ages and copies, never NULL. What the keys and codecs rest on is in docs/adr/005.

-- +goose Up
-- +goose NO TRANSACTION

-- What all rows of a batch have in common; (source, epoch, seq) names it.
-- +goose StatementBegin
CREATE TABLE IF NOT EXISTS batches
(
    committed   DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    received    DateTime64(6, 'UTC') COMMENT 'by the subscriber''s clock' CODEC(Delta, ZSTD(1)),
    source_time DateTime64(6, 'UTC') COMMENT 'by the engine''s clock; 1970 = unknown' CODEC(Delta, ZSTD(1)),
    stream      Int64 COMMENT 'creation time of the bus stream in ns: its identity' CODEC(ZSTD(1)),
    stream_seq  UInt64 CODEC(Delta, ZSTD(1)),
    source      LowCardinality(String) CODEC(ZSTD(1)),
    epoch       UInt64 CODEC(ZSTD(1)),
    seq         UInt64 CODEC(Delta, ZSTD(1)),
    last        UInt64 COMMENT 'of a range that was lost; else seq' CODEC(Delta, ZSTD(1)),
    way         LowCardinality(String) COMMENT 'live, recovered, held, asked, lost or dropped' CODEC(ZSTD(1)),
    blocks      UInt32 COMMENT 'block operations' CODEC(T64, ZSTD(1)),
    run_ev      Array(UInt32) COMMENT 'of each run of stored blocks: the ordinal of its event' CODEC(ZSTD(1)),
    run_start   Array(UInt64) COMMENT 'hash of its first block' CODEC(ZSTD(1)),
    run_prefix  Array(UInt64) COMMENT 'prefix hash of what it continues; 0 = nothing, or unknown' CODEC(ZSTD(1)),
    run_root    Array(UInt8) COMMENT '1 = it continues nothing' CODEC(ZSTD(1)),
    INDEX by_stream (stream, stream_seq) TYPE minmax GRANULARITY 1
)
ENGINE = MergeTree
PARTITION BY toDate(committed)
ORDER BY (source, epoch, seq)
TTL toDate(committed) + INTERVAL 30 DAY
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000;
-- +goose StatementEnd

-- A row a block. Rows of one hash lie together within their hour, so that times are whole seconds: finer ones, and those of the
-- other clocks, are the batch's.
-- +goose StatementBegin
CREATE TABLE IF NOT EXISTS block_events
(
    committed   DateTime('UTC') CODEC(T64, ZSTD(1)),
    source      LowCardinality(String) CODEC(ZSTD(1)),
    epoch       UInt64 CODEC(ZSTD(1)),
    seq         UInt64 CODEC(T64, ZSTD(1)),
    ev          UInt32 COMMENT 'ordinal of the event in its batch' CODEC(T64, ZSTD(1)),
    pos         UInt32 COMMENT 'ordinal of the block in its event: the one before it is its parent' CODEC(T64, ZSTD(1)),
    op          Enum8('STORED' = 1, 'EVICTED' = 2, 'LOADED' = 3, 'CLEARED' = 4) CODEC(ZSTD(1)),
    cause       Enum8('' = 0, 'engine' = 1, 'resync' = 2) COMMENT 'of a CLEARED' CODEC(ZSTD(1)),
    tier        LowCardinality(String) CODEC(ZSTD(1)),
    kv_group    Int32 COMMENT '-1 = none told' CODEC(ZSTD(1)),
    hash        UInt64 COMMENT 'prefix hash, or, when named is 0, the engine''s hash' CODEC(ZSTD(1)),
    named       UInt8 CODEC(ZSTD(1)),
    engine_hash UInt64 COMMENT 'first 8 bytes of longer ones' CODEC(ZSTD(1)),
    run_parent  UInt64 COMMENT 'engine hash before the run, on its first block; 0 = none' CODEC(ZSTD(1)),
    run_prefix  UInt64 COMMENT 'prefix hash of run_parent, of a STORED; 0 = none, or unknown' CODEC(ZSTD(1)),
    effect      Int8 COMMENT 'on copies, as the publisher judged' CODEC(ZSTD(1)),
    copies      Int32 COMMENT 'left by an EVICTED; -1 = unknown' CODEC(T64, ZSTD(1)),
    age_ms      Int64 COMMENT 'of an EVICTED block since copies rose from 0; -1 = unknown' CODEC(ZSTD(1)),
    block_size  UInt32 COMMENT 'tokens a block, of a STORED; 0 = not told' CODEC(T64, ZSTD(1)),
    cluster     String ALIAS decodeURLComponent(splitByChar('.', source)[1]),
    model       String ALIAS decodeURLComponent(splitByChar('.', source)[2]),
    instance    String ALIAS decodeURLComponent(splitByChar('.', source)[3]),
    dp_rank     UInt32 ALIAS toUInt32OrZero(splitByChar('.', source)[4]),
    origin      String ALIAS splitByChar('.', source)[5],
    INDEX by_engine_hash engine_hash TYPE bloom_filter(0.01) GRANULARITY 4
)
ENGINE = MergeTree
PARTITION BY toDate(committed)
ORDER BY (toStartOfHour(committed), hash, source, seq, ev, pos)
TTL toDate(committed) + INTERVAL 30 DAY
SETTINGS min_bytes_for_wide_part = 134217728, ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000;
-- +goose StatementEnd

-- What a prefix continues, once for each day on which it was stored. Rows of one prefix add up to one, told twice or not:
-- GROUP BY hash, named, for not all are merged. A block without a name stands under its engine's hash, as does its parent.
-- +goose StatementBegin
CREATE TABLE IF NOT EXISTS chains
(
    day        Date CODEC(ZSTD(1)),
    hash       UInt64 CODEC(Delta, ZSTD(1)),
    named      UInt8 CODEC(ZSTD(1)),
    parent     SimpleAggregateFunction(max, UInt64) COMMENT '0 = none, or, when depth is 0, unknown' CODEC(ZSTD(1)),
    depth      SimpleAggregateFunction(max, UInt32) COMMENT 'blocks from the root to this one; 0 = unknown' CODEC(T64, ZSTD(1)),
    block_size SimpleAggregateFunction(max, UInt32) CODEC(T64, ZSTD(1)),
    first_seen SimpleAggregateFunction(min, DateTime('UTC')) COMMENT 'when the bus took it, on that day' CODEC(T64, ZSTD(1))
)
ENGINE = AggregatingMergeTree
PARTITION BY day
ORDER BY (hash, named)
TTL day + INTERVAL 30 DAY
SETTINGS min_bytes_for_wide_part = 134217728, ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE TABLE IF NOT EXISTS loads
(
    committed   DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    stream      Int64 CODEC(ZSTD(1)),
    stream_seq  UInt64 CODEC(Delta, ZSTD(1)),
    source      LowCardinality(String),
    epoch       UInt64 CODEC(ZSTD(1)),
    seq         UInt64 CODEC(Delta, ZSTD(1)),
    ev          UInt32 COMMENT 'ordinal of the LOADED in its batch' CODEC(ZSTD(1)),
    source_time DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    from_tier   LowCardinality(String),
    tier        LowCardinality(String),
    peer        LowCardinality(String),
    request     String,
    blocks      UInt32 CODEC(T64, ZSTD(1)),
    bytes       UInt64 CODEC(T64, ZSTD(1)),
    duration_us UInt64 CODEC(T64, ZSTD(1)),
    model       String ALIAS decodeURLComponent(splitByChar('.', source)[2]),
    instance    String ALIAS decodeURLComponent(splitByChar('.', source)[3]),
    INDEX by_stream (stream, stream_seq) TYPE minmax GRANULARITY 1
)
ENGINE = MergeTree
PARTITION BY toDate(committed)
ORDER BY (source, committed, seq, ev)
TTL toDate(committed) + INTERVAL 30 DAY
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000;
-- +goose StatementEnd

-- A row a transfer record: what a connector loaded, saved or could not, and leases that ended unused. (stream, stream_seq) is the
-- place in the stream of records.
-- +goose StatementBegin
CREATE TABLE IF NOT EXISTS transfers
(
    committed   DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    source_time DateTime64(6, 'UTC') COMMENT 'when it ended, by the engine''s clock' CODEC(Delta, ZSTD(1)),
    stream      Int64 CODEC(ZSTD(1)),
    stream_seq  UInt64 CODEC(Delta, ZSTD(1)),
    rec         UInt32 COMMENT 'ordinal of the record in its message' CODEC(T64, ZSTD(1)),
    source      LowCardinality(String) CODEC(ZSTD(1)),
    kind        LowCardinality(String) COMMENT 'loaded, saved, failed or lease_expired' CODEC(ZSTD(1)),
    transport   LowCardinality(String) CODEC(ZSTD(1)),
    peer        LowCardinality(String) CODEC(ZSTD(1)),
    from_tier   LowCardinality(String) CODEC(ZSTD(1)),
    to_tier     LowCardinality(String) CODEC(ZSTD(1)),
    request     String CODEC(ZSTD(1)),
    blocks      UInt32 COMMENT 'that were to be moved; of a failed one, those that were not' CODEC(T64, ZSTD(1)),
    ranks       UInt32 COMMENT 'whose transfers are in it' CODEC(T64, ZSTD(1)),
    bytes       UInt64 COMMENT 'moved, over all ranks' CODEC(T64, ZSTD(1)),
    pieces      UInt64 COMMENT 'contiguous pieces of memory, over all ranks' CODEC(T64, ZSTD(1)),
    duration_us UInt64 COMMENT 'from post to completion, of the slowest rank' CODEC(T64, ZSTD(1)),
    post_us     UInt64 COMMENT 'of the call that posted, of the slowest rank' CODEC(T64, ZSTD(1)),
    reason      String COMMENT 'of a failed one' CODEC(ZSTD(1)),
    model       String ALIAS decodeURLComponent(splitByChar('.', source)[2]),
    instance    String ALIAS decodeURLComponent(splitByChar('.', source)[3]),
    INDEX by_stream (stream, stream_seq) TYPE minmax GRANULARITY 1
)
ENGINE = MergeTree
PARTITION BY toDate(committed)
ORDER BY (source, committed, stream_seq, rec)
TTL toDate(committed) + INTERVAL 30 DAY
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000;
-- +goose StatementEnd

-- A row a lookup: how much of a prompt was cached, as an index expected it, or as an engine found it. The source is the engine that the
-- prompt went to, of the index the one with the most of it; without an instance: none had any.
-- +goose StatementBegin
CREATE TABLE IF NOT EXISTS lookups
(
    committed   DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    source_time DateTime64(6, 'UTC') COMMENT 'when it was answered, by the asker''s clock' CODEC(Delta, ZSTD(1)),
    stream      Int64 CODEC(ZSTD(1)),
    stream_seq  UInt64 CODEC(Delta, ZSTD(1)),
    rec         UInt32 COMMENT 'ordinal of the record in its message' CODEC(T64, ZSTD(1)),
    source      LowCardinality(String) CODEC(ZSTD(1)),
    asker       LowCardinality(String) COMMENT 'index, router or connector' CODEC(ZSTD(1)),
    request     String COMMENT 'empty = not told' CODEC(ZSTD(1)),
    session     String CODEC(ZSTD(1)),
    tenant      LowCardinality(String) CODEC(ZSTD(1)),
    one_in      UInt32 COMMENT 'of lookups like it, one in so many is told' CODEC(T64, ZSTD(1)),
    block_size  UInt32 COMMENT 'tokens a block; 0 = unknown' CODEC(T64, ZSTD(1)),
    tokens      UInt64 COMMENT 'asked for' CODEC(T64, ZSTD(1)),
    prefix      UInt64 COMMENT 'of the last whole block asked for; 0 = unknown' CODEC(ZSTD(1)),
    gpu_tokens  UInt64 COMMENT 'each token in its warmest tier' CODEC(T64, ZSTD(1)),
    cpu_tokens  UInt64 CODEC(T64, ZSTD(1)),
    disk_tokens UInt64 CODEC(T64, ZSTD(1)),
    external_tokens UInt64 COMMENT 'in stores and other tiers' CODEC(T64, ZSTD(1)),
    holders     UInt32 COMMENT 'engines that have a part of it' CODEC(T64, ZSTD(1)),
    longest     UInt64 COMMENT 'tokens that the engine with the most of them has' CODEC(T64, ZSTD(1)),
    matched     UInt64 ALIAS gpu_tokens + cpu_tokens + disk_tokens + external_tokens,
    model       String ALIAS decodeURLComponent(splitByChar('.', source)[2]),
    instance    String ALIAS decodeURLComponent(splitByChar('.', source)[3]),
    INDEX by_request request TYPE bloom_filter(0.01) GRANULARITY 4,
    INDEX by_stream (stream, stream_seq) TYPE minmax GRANULARITY 1
)
ENGINE = MergeTree
PARTITION BY toDate(committed)
ORDER BY (source, committed, stream_seq, rec)
TTL toDate(committed) + INTERVAL 30 DAY
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000;
-- +goose StatementEnd

-- A row a request that an engine is done with, as its connector knows it.
-- +goose StatementBegin
CREATE TABLE IF NOT EXISTS requests
(
    committed   DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    source_time DateTime64(6, 'UTC') COMMENT 'when it ended, by the engine''s clock' CODEC(Delta, ZSTD(1)),
    stream      Int64 CODEC(ZSTD(1)),
    stream_seq  UInt64 CODEC(Delta, ZSTD(1)),
    rec         UInt32 COMMENT 'ordinal of the record in its message' CODEC(T64, ZSTD(1)),
    source      LowCardinality(String) CODEC(ZSTD(1)),
    request     String CODEC(ZSTD(1)),
    session     String COMMENT 'empty = not told' CODEC(ZSTD(1)),
    tenant      LowCardinality(String) CODEC(ZSTD(1)),
    prompt      UInt64 COMMENT 'tokens' CODEC(T64, ZSTD(1)),
    output      UInt64 COMMENT 'tokens generated' CODEC(T64, ZSTD(1)),
    cached      UInt64 COMMENT 'tokens of the prompt that the engine had when it began' CODEC(T64, ZSTD(1)),
    external    UInt64 COMMENT 'tokens that were to be loaded from outside' CODEC(T64, ZSTD(1)),
    ended       LowCardinality(String) COMMENT 'stopped, length, aborted or load_error' CODEC(ZSTD(1)),
    model       String ALIAS decodeURLComponent(splitByChar('.', source)[2]),
    instance    String ALIAS decodeURLComponent(splitByChar('.', source)[3]),
    INDEX by_request request TYPE bloom_filter(0.01) GRANULARITY 4,
    INDEX by_stream (stream, stream_seq) TYPE minmax GRANULARITY 1
)
ENGINE = MergeTree
PARTITION BY toDate(committed)
ORDER BY (source, committed, stream_seq, rec)
TTL toDate(committed) + INTERVAL 30 DAY
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000;
-- +goose StatementEnd

-- A row a sample of a device; what is not known is 0.
-- +goose StatementBegin
CREATE TABLE IF NOT EXISTS gpu_samples
(
    committed   DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    source_time DateTime64(6, 'UTC') COMMENT 'by the sampler''s clock' CODEC(Delta, ZSTD(1)),
    stream      Int64 CODEC(ZSTD(1)),
    stream_seq  UInt64 CODEC(Delta, ZSTD(1)),
    rec         UInt32 COMMENT 'ordinal of the record in its message' CODEC(T64, ZSTD(1)),
    source      LowCardinality(String) CODEC(ZSTD(1)),
    device      LowCardinality(String) COMMENT 'UUID' CODEC(ZSTD(1)),
    memory_used UInt64 COMMENT 'bytes' CODEC(T64, ZSTD(1)),
    memory_total UInt64 CODEC(T64, ZSTD(1)),
    busy        UInt32 COMMENT 'percent of the time in which a kernel ran' CODEC(T64, ZSTD(1)),
    memory_busy UInt32 COMMENT 'percent of the time in which memory was read or written' CODEC(T64, ZSTD(1)),
    power_mw    UInt64 CODEC(T64, ZSTD(1)),
    temperature UInt32 COMMENT 'degrees Celsius' CODEC(T64, ZSTD(1)),
    pcie_received UInt64 COMMENT 'bytes a second' CODEC(T64, ZSTD(1)),
    pcie_sent   UInt64 CODEC(T64, ZSTD(1)),
    model       String ALIAS decodeURLComponent(splitByChar('.', source)[2]),
    instance    String ALIAS decodeURLComponent(splitByChar('.', source)[3]),
    INDEX by_stream (stream, stream_seq) TYPE minmax GRANULARITY 1
)
ENGINE = MergeTree
PARTITION BY toDate(committed)
ORDER BY (source, committed, stream_seq, rec)
TTL toDate(committed) + INTERVAL 30 DAY
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE TABLE IF NOT EXISTS ledger
(
    committed  DateTime64(6, 'UTC'),
    stream     Int64,
    stream_seq UInt64,
    source     LowCardinality(String),
    epoch      UInt64,
    seq        UInt64 COMMENT 'first of the range; of a resync, of what is known only by its outcome',
    last       UInt64,
    kind       LowCardinality(String) COMMENT 'life, lost, dropped, mismatch, resync, state',
    state      LowCardinality(String) COMMENT 'of a state',
    snapshot   Int64 COMMENT 'of a resync: the snapshot that is complete; 0 = none',
    reason     String,
    model      String ALIAS decodeURLComponent(splitByChar('.', source)[2]),
    instance   String ALIAS decodeURLComponent(splitByChar('.', source)[3])
)
ENGINE = MergeTree
PARTITION BY toDate(committed)
ORDER BY (source, committed, seq)
TTL toDate(committed) + INTERVAL 90 DAY
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE TABLE IF NOT EXISTS snapshots
(
    committed   DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    source      LowCardinality(String),
    epoch       UInt64 CODEC(ZSTD(1)),
    seq         UInt64 CODEC(ZSTD(1)),
    snapshot    Int64 COMMENT 'when the checkpoint was written, in ns' CODEC(ZSTD(1)),
    hash        UInt64,
    named       UInt8 CODEC(ZSTD(1)),
    engine_hash UInt64,
    tier        LowCardinality(String),
    kv_group    Int32 CODEC(ZSTD(1)),
    copies      UInt32 CODEC(ZSTD(1)),
    stored      DateTime64(6, 'UTC') COMMENT 'by the engine''s clock; 1970 = unknown' CODEC(ZSTD(1)),
    INDEX by_hash hash TYPE bloom_filter(0.01) GRANULARITY 4,
    INDEX by_engine_hash engine_hash TYPE bloom_filter(0.01) GRANULARITY 4
)
ENGINE = MergeTree
PARTITION BY toDate(committed)
ORDER BY (source, snapshot, hash)
TTL toDate(committed) + INTERVAL 30 DAY
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000;
-- +goose StatementEnd

-- Where the writer stands. The row of source '' has the position of its round in the stream of events, that of 'records' the one
-- in the stream of records, the others where each source stood.
-- +goose StatementBegin
CREATE TABLE IF NOT EXISTS progress
(
    source      String,
    round       UInt64,
    committed   DateTime64(6, 'UTC'),
    stream_name String,
    stream      Int64,
    stream_seq  UInt64,
    fence       UInt64,
    epoch       UInt64,
    started     UInt8,
    seq         UInt64,
    digest      UInt64
)
ENGINE = ReplacingMergeTree(round)
ORDER BY source
SETTINGS non_replicated_deduplication_window = 1000;
-- +goose StatementEnd

-- What history told, by time, source, life and tier: counted for times that have ended, and replaced as a whole. A row is counted again when
-- rows come late to its time, and the version, which grows with the writer's rounds, says which one is read: FINAL. Seconds are counted from
-- block_events, batches and loads, minutes from seconds, hours from minutes. How far they go is in progress, at the source 'rollups'.
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
DROP TABLE IF EXISTS progress;
DROP TABLE IF EXISTS snapshots;
DROP TABLE IF EXISTS ledger;
DROP TABLE IF EXISTS gpu_samples;
DROP TABLE IF EXISTS requests;
DROP TABLE IF EXISTS lookups;
DROP TABLE IF EXISTS transfers;
DROP TABLE IF EXISTS loads;
DROP TABLE IF EXISTS chains;
DROP TABLE IF EXISTS block_events;
DROP TABLE IF EXISTS batches;
