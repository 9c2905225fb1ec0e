//! Gives Dynamo's index (ThreadPoolIndexer<ConcurrentRadixTreeCompressed>, one event thread, one reader thread) the work that
//! the Go side wrote to a file, and prints its figures as one JSON object.
//!
//! The file is a row of records, all little-endian, each padded to 8 bytes:
//!   kind u32 · worker u32 · milliseconds u64 · n u32 · has_parent u32 · parent u64 · payload
//! kind 1, a query: n local hashes (u64). Kind 2, blocks stored: n pairs of engine hash and local hash. Kind 3, blocks
//! removed: n engine hashes. Kind 4, an engine's message: n bytes.

use std::hint::black_box;
use std::time::{Duration, Instant};

use dynamo_kv_router::indexer::{KvIndexerInterface, SyncIndexer, ThreadPoolIndexer};
use dynamo_kv_router::protocols::*;
use dynamo_kv_router::zmq_wire::{ZmqEventNormalizer, decode_event_batch};
use dynamo_kv_router::ConcurrentRadixTreeCompressed;

type Index = ThreadPoolIndexer<ConcurrentRadixTreeCompressed>;

const BLOCK_SIZE: u32 = 16;

enum Body {
    Query(Vec<LocalBlockHash>),
    Write(Option<RouterEvent>, usize),
    Message(Vec<u8>),
}

struct Record {
    worker: u32,
    millis: u64,
    body: Body,
}

fn read(path: &str) -> Vec<Record> {
    let data = std::fs::read(path).expect("read the work");
    let u32_at = |at: usize| u32::from_le_bytes(data[at..at + 4].try_into().unwrap());
    let u64_at = |at: usize| u64::from_le_bytes(data[at..at + 8].try_into().unwrap());
    let mut records = Vec::new();
    let (mut at, mut id) = (0, 0);
    while at < data.len() {
        let (kind, worker, millis) = (u32_at(at), u32_at(at + 4), u64_at(at + 8));
        let (n, has_parent, parent) = (u32_at(at + 16) as usize, u32_at(at + 20), u64_at(at + 24));
        at += 32;
        let event = |data, id| {
            Some(RouterEvent::new(worker as u64, KvCacheEvent { event_id: id, data, dp_rank: 0 }))
        };
        id += 1;
        let body = match kind {
            1 => Body::Query((0..n).map(|i| LocalBlockHash(u64_at(at + 8 * i))).collect()),
            2 => {
                let blocks = (0..n)
                    .map(|i| KvCacheStoredBlockData {
                        block_hash: ExternalSequenceBlockHash(u64_at(at + 16 * i)),
                        tokens_hash: LocalBlockHash(u64_at(at + 16 * i + 8)),
                        mm_extra_info: None,
                    })
                    .collect();
                let parent_hash = (has_parent != 0).then_some(ExternalSequenceBlockHash(parent));
                Body::Write(event(KvCacheEventData::Stored(KvCacheStoreData { parent_hash, start_position: None, blocks }), id), n)
            }
            3 => {
                let block_hashes = (0..n).map(|i| ExternalSequenceBlockHash(u64_at(at + 8 * i))).collect();
                Body::Write(event(KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }), id), n)
            }
            4 => Body::Message(data[at..at + n].to_vec()),
            _ => panic!("record of kind {kind}"),
        };
        at += match kind {
            2 => 16 * n,
            4 => n.div_ceil(8) * 8,
            _ => 8 * n,
        };
        records.push(Record { worker, millis, body });
    }
    records
}

fn runtime() -> tokio_free::Runtime {
    tokio_free::Runtime
}

/// The index's futures that we await need no reactor: they are polled by this thread until they are ready.
mod tokio_free {
    use std::future::Future;
    use std::pin::pin;
    use std::sync::Arc;
    use std::task::{Context, Poll, Wake, Waker};

    pub struct Runtime;

    struct Unpark(std::thread::Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    impl Runtime {
        pub fn block_on<F: Future>(&self, f: F) -> F::Output {
            let mut f = pin!(f);
            let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
            loop {
                if let Poll::Ready(v) = f.as_mut().poll(&mut Context::from_waker(&waker)) {
                    return v;
                }
                std::thread::park();
            }
        }
    }
}

fn drain(index: &Index) {
    runtime().block_on(index.flush_and_wait()).expect("flush");
}

fn quantile(ns: &mut [u64], q: f64) -> f64 {
    if ns.is_empty() {
        return 0.0;
    }
    ns.sort_unstable();
    ns[(q * (ns.len() - 1) as f64) as usize] as f64 / 1000.0
}

fn rss() -> f64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<f64>().unwrap() * 4096.0
}

fn cpu() -> f64 {
    let mut u: libc::rusage = unsafe { std::mem::zeroed() };
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut u) };
    let us = |t: libc::timeval| t.tv_sec as f64 * 1e6 + t.tv_usec as f64;
    us(u.ru_utime) + us(u.ru_stime)
}

/// Waits for a moment, spinning at the end, and returns when it was over.
fn wait_until(began: Instant, at: Duration) -> Duration {
    loop {
        let now = began.elapsed();
        if now >= at {
            return now;
        }
        if at - now > Duration::from_millis(2) {
            std::thread::sleep(at - now - Duration::from_millis(1));
        }
    }
}

/// All writes, as fast as the event thread takes them.
fn closed(mut records: Vec<Record>, index: &Index) -> Vec<(&'static str, f64)> {
    let (mut ops, began) = (0, Instant::now());
    for r in &mut records {
        if let Body::Write(event, n) = &mut r.body {
            ops += *n;
            index.enqueue_event(event.take().unwrap()).unwrap();
        }
    }
    drain(index);
    vec![("block_ops_per_s", ops as f64 / began.elapsed().as_secs_f64())]
}

/// Queries and writes at their deadlines, until the last one is done. Writes are issued by the reader's thread too: handing one
/// over is a push onto the event thread's queue.
fn timed(mut records: Vec<Record>, index: &Index, window: f64) -> Vec<(&'static str, f64)> {
    let span = records.last().unwrap().millis + 1;
    let scale = window / span as f64;
    let (mut service, mut answered) = (Vec::new(), Vec::new());
    let (mut blocks, mut logical) = (0, 0);
    let began = Instant::now();
    let mut issued = Duration::ZERO;
    for r in &mut records {
        let deadline = Duration::from_secs_f64(r.millis as f64 * scale);
        let start = wait_until(began, deadline);
        logical += 1;
        match &mut r.body {
            Body::Query(hashes) => {
                black_box(index.backend().find_matches(hashes, false));
                let end = began.elapsed();
                service.push((end - start).as_nanos() as u64);
                answered.push((end - deadline).as_nanos() as u64);
                blocks += hashes.len();
            }
            Body::Write(event, n) => {
                index.enqueue_event(event.take().unwrap()).unwrap();
                blocks += *n;
            }
            Body::Message(_) => {}
        }
        issued = began.elapsed();
    }
    drain(index);
    let total = began.elapsed().as_secs_f64();
    vec![
        ("kept_up", (total <= 1.10 * window) as u32 as f64),
        ("generator_valid", (issued.as_secs_f64() <= 1.01 * window) as u32 as f64),
        ("block_ops_per_s", blocks as f64 / total),
        ("logical_ops_per_s", logical as f64 / total),
        ("lookup_p50_us", quantile(&mut service, 0.5)),
        ("lookup_p99_us", quantile(&mut service, 0.99)),
        ("scheduled_p50_us", quantile(&mut answered, 0.5)),
        ("scheduled_p99_us", quantile(&mut answered, 0.99)),
        ("drain_ms", f64::max(0.0, (total - window) * 1000.0)),
    ]
}

/// Growth of resident memory an entry, at the worst size from 1.0 M to 2.1 M entries. Events are read beforehand; each is
/// copied when it is handed over, so that what the index keeps of it is the index's.
fn fill(records: Vec<Record>, index: &Index) -> Vec<(&'static str, f64)> {
    let (mut entries, mut next) = (0usize, 1_000_000usize);
    let (mut worst, mut last) = (0f64, 0f64);
    let before = rss();
    for r in &records {
        if let Body::Write(event, n) = &r.body {
            index.enqueue_event(event.clone().unwrap()).unwrap();
            entries += n;
            if entries % 8192 < *n {
                drain(index);
            }
            if entries >= next {
                drain(index);
                next += 20_000;
                last = (rss() - before) / entries as f64;
                worst = worst.max(last);
            }
        }
    }
    vec![("bytes_per_entry", worst), ("at_end", last)]
}

/// Prompts by local hashes: worker names the case (0 full, 1 staggered, 2 miss). Dynamo scores by local hashes along its tree,
/// which is what our lookup by prefix hashes is; hashing tokens comes on top.
fn lookups(mut records: Vec<Record>, index: &Index) -> Vec<(&'static str, f64)> {
    for r in &mut records {
        if let Body::Write(event, _) = &mut r.body {
            index.enqueue_event(event.take().unwrap()).unwrap();
        }
    }
    drain(index);
    ["full_us", "stagger_us", "miss_us"]
        .into_iter()
        .enumerate()
        .map(|(case, name)| {
            let mut rounds: Vec<f64> = (0..41)
                .map(|_| {
                    let (mut n, began) = (0, Instant::now());
                    for r in &records {
                        if let (true, Body::Query(hashes)) = (r.worker as usize == case, &r.body) {
                            black_box(index.backend().find_matches(hashes, false));
                            n += 1;
                        }
                    }
                    began.elapsed().as_secs_f64() * 1e6 / f64::max(1.0, n as f64)
                })
                .collect();
            rounds.sort_by(f64::total_cmp);
            (name, rounds[20])
        })
        .collect()
}

/// Engines' messages, decoded, normalised and applied: µs of processor time an event.
fn messages(records: Vec<Record>, index: &Index) -> Vec<(&'static str, f64)> {
    let pods = records.iter().map(|r| r.worker).max().unwrap_or(0) as usize + 1;
    let mut normalizers: Vec<_> = (0..pods).map(|_| ZmqEventNormalizer::new(BLOCK_SIZE)).collect();
    let (mut events, before) = (0u64, cpu());
    for r in &records {
        let Body::Message(payload) = &r.body else { continue };
        let worker = WorkerWithDpRank::new(r.worker as u64, 0);
        for raw in decode_event_batch(payload).expect("decode").events {
            events += 1;
            let placed = normalizers[r.worker as usize].normalize(raw, events, worker);
            if let Some(event) = placed.and_then(PlacementEvent::into_router_event) {
                index.enqueue_event(event).unwrap();
            }
        }
    }
    drain(index);
    vec![("all_us", (cpu() - before) / events as f64)]
}

/// The work in order, one after another and untimed: what the index refused, and what its answers add up to. Without this a
/// rate would say nothing: an event that is refused is quick.
fn verify(mut records: Vec<Record>, index: &Index) -> Vec<(&'static str, f64)> {
    let (mut writes, mut refused, mut refused_blocks) = (0, 0, 0);
    let mut sums = [(0u64, 0u64); 3];
    for r in &mut records {
        match &mut r.body {
            Body::Query(hashes) => {
                let answer = index.backend().find_matches(hashes, false);
                let sum = &mut sums[(r.worker as usize).min(2)];
                sum.0 += answer.scores.len() as u64;
                sum.1 += answer.scores.values().map(|s| *s as u64).sum::<u64>();
            }
            Body::Write(event, n) => {
                writes += 1;
                if runtime().block_on(index.apply_event_and_wait(event.take().unwrap())).is_err() {
                    refused += 1;
                    refused_blocks += *n;
                }
            }
            Body::Message(_) => {}
        }
    }
    vec![
        ("writes", writes as f64),
        ("refused", refused as f64),
        ("refused_blocks", refused_blocks as f64),
        ("sources_0", sums[0].0 as f64),
        ("blocks_0", sums[0].1 as f64),
        ("sources_1", sums[1].0 as f64),
        ("blocks_1", sums[1].1 as f64),
        ("sources_2", sums[2].0 as f64),
        ("blocks_2", sums[2].1 as f64),
    ]
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let (mode, path) = (args[1].as_str(), args[2].as_str());
    let index = ThreadPoolIndexer::new(ConcurrentRadixTreeCompressed::new(), 1, BLOCK_SIZE);
    let records = read(path);
    let figures = match mode {
        "closed" => closed(records, &index),
        "timed" => timed(records, &index, args[3].parse().expect("a window in seconds")),
        "fill" => fill(records, &index),
        "lookups" => lookups(records, &index),
        "messages" => messages(records, &index),
        "verify" => verify(records, &index),
        _ => panic!("mode {mode}"),
    };
    let text: Vec<String> = figures.iter().map(|(name, v)| format!("\"{name}\":{v}")).collect();
    println!("{{{}}}", text.join(","));
    index.shutdown();
    std::process::exit(0);
}
