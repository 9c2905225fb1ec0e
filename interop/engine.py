"""Steps a whole vLLM engine on the CPU: a JSON command a line in, a JSON answer a line out.

Run by the venv that `setup.sh engine` makes. README.md describes the commands. The engine is
vLLM's own, from its arguments down to the publisher: only the model is made up (a tiny one,
with random weights), and two methods are wrapped to note when they are called.
"""

import contextlib
import json
import os
import sys
import tempfile
from importlib import metadata
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": str(int("--serve" in sys.argv)),  # 0: its pool can be seen
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

from vllm import EngineArgs, SamplingParams
from vllm.config import KVEventsConfig
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    maybe_convert_block_hash,
)
from vllm.v1.engine.llm_engine import LLMEngine

COMMON = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
MODELS = {
    "llama": COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
    },
    # One group of full attention, one that sees 64 tokens back.
    "hybrid": COMMON
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 64,
        "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh",
    },
}


def serve(port: str, *options: str):
    """Becomes vLLM's own HTTP server with its engine as a process, as people run it."""
    folder = tempfile.mkdtemp(prefix="kvstrata-model-")
    Path(folder, "config.json").write_text(json.dumps(MODELS["llama"]))
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{int(port) + 1}",
        "replay_endpoint": f"tcp://*:{int(port) + 2}",
    }
    command = f"""-m vllm.entrypoints.openai.api_server --model {folder} --served-model-name tiny
        --host 127.0.0.1 --port {port} --skip-tokenizer-init --load-format dummy --dtype float32
        --enforce-eager --block-size 32 --enable-prompt-tokens-details --kv-events-config""".split()
    os.execv(sys.executable, [sys.executable, *command, json.dumps(events), *options])


class Session:
    """One engine, the commands that step it, and notes of what it did."""

    def open(self, model="llama", endpoint="tcp://*:0", replay_endpoint="tcp://*:0", **options):
        """Starts the engine; options are those of vLLM's EngineArgs."""
        folder = tempfile.mkdtemp(prefix="kvstrata-model-")
        config = Path(folder, "config.json")
        config.write_text(json.dumps(MODELS[model]))
        arguments = {
            "model": folder,
            "served_model_name": model,
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "dtype": "float32",
            "seed": 0,
            "enforce_eager": True,
            "block_size": 32,  # the least that the CPU's attention takes
            "kv_events_config": KVEventsConfig(
                enable_kv_cache_events=True,
                publisher="zmq",
                endpoint=endpoint,
                replay_endpoint=replay_endpoint,
            ),
        }
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments | options))
        config.unlink()
        Path(folder).rmdir()
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.manager = self.scheduler.kv_cache_manager
        self.publisher = self.scheduler.kv_event_publisher
        self.preemptions = {}
        self.published = 0
        self.lookups = []
        self._watch()
        where = self.publisher.get_publisher_config()
        return {
            "version": metadata.version("vllm-cpu"),
            "torch": metadata.version("torch"),
            "endpoint": where.endpoint,
            "replay_endpoint": where.replay_endpoint,
            "blocks": self.manager.block_pool.num_gpu_blocks,
            "asynchronous": self.engine.vllm_config.scheduler_config.async_scheduling,
            "groups": [
                {"kind": kind, "window": window, "block_size": group.kv_cache_spec.block_size}
                for (kind, window), group in zip(
                    self.manager.kv_cache_event_metadata,
                    self.manager.kv_cache_config.kv_cache_groups,
                    strict=True,
                )
            ],
        }

    def _watch(self):
        """Notes each search of the prefix cache, each batch published, and each preemption."""
        search, publish = self.manager.get_computed_blocks, self.publisher.publish
        preempt = self.scheduler._preempt_request

        def noted_search(request):
            told = len(self.manager.block_pool.kv_event_queue)
            found = search(request)
            lookup = {
                "id": external(request),
                "tokens": list(request.all_token_ids),
                "salt": request.cache_salt,
                "cached": found[1],
                "seq": self.published,
                "events": told,
            }
            if self.lookups[-1:] != [lookup]:  # one that waits is searched for at each step
                self.lookups.append(lookup)
            return found

        def noted_publish(batch):
            self.published += 1
            publish(batch)

        def noted_preempt(request, *arguments, **options):
            name = external(request)
            self.preemptions[name] = self.preemptions.get(name, 0) + 1
            return preempt(request, *arguments, **options)

        self.manager.get_computed_blocks = noted_search
        self.publisher.publish = noted_publish
        self.scheduler._preempt_request = noted_preempt

    def add(self, id, tokens, n, salt=None, report=None, random=False):
        """Queues a request for n tokens behind the prompt: the likeliest, or random ones."""
        prompt = {"prompt_token_ids": tokens}
        if salt is not None:
            prompt["cache_salt"] = salt
        params = SamplingParams(
            max_tokens=n,
            temperature=int(random),
            ignore_eos=True,
            detokenize=False,
            extra_args=None if report is None else {"kv_cache_report_mode": report},
        )
        self.engine.add_request(id, prompt, params)
        return self._state([])

    def step(self, n=None):
        """Makes n steps, or as many as there is work for."""
        finished = []
        while (n is None or n > 0) and self._busy():
            for output in self.engine.step():
                if output.finished:
                    finished.append(
                        {
                            "id": output.request_id,
                            "cached": output.num_cached_tokens,
                            "output": list(output.outputs[0].token_ids),
                            "preemptions": self.preemptions.pop(output.request_id, 0),
                        }
                    )
            n = n and n - 1
        return self._state(finished)

    def _busy(self):
        # As the loop of vLLM's own engine process decides it.
        return self.scheduler.has_requests() or bool(self.core.batch_queue)

    def _state(self, finished):
        lookups, self.lookups = self.lookups, []
        return {
            "finished": finished,
            "lookups": lookups,
            "published": self.published,
            "pending": len(self.manager.block_pool.kv_event_queue),
            "busy": self._busy(),
        }

    def reset(self, running=False):
        """Resets the prefix cache; running also preempts what runs."""
        done = self.engine.reset_prefix_cache(reset_running_requests=running)
        return {"done": done, **self._state([])}

    def dump(self):
        """Tells what the block pool has cached: every hash, and in how many blocks."""
        cached = {}
        for key, blocks in self.manager.block_pool.cached_block_hash_to_block._cache.items():
            name = maybe_convert_block_hash(get_block_hash(key))
            copies = len(blocks) if isinstance(blocks, dict) else 1
            cached[get_group_id(key), name] = copies
        return {
            "cached": [
                {"group": group, "hash": name, "copies": copies}
                for (group, name), copies in cached.items()
            ],
            "free": self.manager.block_pool.get_num_free_blocks(),
            **self._state([]),
        }


def external(request) -> str:
    """Returns the id that the request was added with."""
    return request.request_id.rpartition("-")[0] or request.request_id


def main():
    """Answers each line of stdin; an error is an answer, not an end."""
    if "--serve" in sys.argv:
        serve(*sys.argv[2:])
    # vLLM writes to stdout where it likes.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    session = Session()
    for line in sys.stdin:
        try:
            command = json.loads(line)
            op = command.pop("op")
            answer = {"ok": True, "op": op, **getattr(session, op)(**command)}
        except Exception as error:
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
