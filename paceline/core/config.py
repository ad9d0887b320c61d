"""Options of all services: one class for each service. Each field is a flag and a key of the TOML file."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, model_validator

from paceline.core import env
from paceline.core.errors import ConfigError
from paceline.core.options import AutoSize, Options, Size, flag, help_of, option, same_option
from paceline.core.planner_options import PlannerOptions
from paceline.core.speculative import speculative_help
from paceline.core.telemetry import LogFormat

GIB = 1 << 30

KV_TOKENS = 24 * 1024
"""Tokens for which KV memory of the size "auto" has room."""

Quantization = Literal["none", "int8", "gguf"]
"""Format of a model's matrices in memory."""
KVPool = Literal["auto", "arena", "device"]
"""Memory that holds the KV blocks with which a worker computes."""
RouterMode = Literal["kv", "round-robin"]
"""The gateway's rule for choosing workers."""
TransportChoice = Literal["auto", "ucx", "grpc"]
"""The transport that copies KV blocks between hosts."""
LogLevel = Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(str.lower)]
"""The lowest severity of messages that are logged."""
GenerationConfig = Literal["auto", "none"]
"""The source of the sampling parameters that a request leaves out."""
ModelImpl = Literal["auto", "native", "transformers"]
"""The code that computes a model: the files of `paceline/models`, or the model's own code in `transformers`."""
DType = Literal["auto", "bfloat16", "float32"]
"""Data type of weights, activations and KV blocks."""


class ServiceConfig(Options):
    """Options of every service."""

    cluster: str = option("default", "name of the stack; stacks with different names can share one Redis", "cluster")
    redis: str = option(
        "redis://127.0.0.1:6379/0",
        "URL of the Redis by which services find each other; with TLS: "
        "rediss://USER:PASSWORD@HOST:PORT/0?ssl_ca_certs=FILE",
        "cluster",
        is_secret=True,
    )
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for all addresses of the machine", "network")
    port: int = option(0, "port to listen on; 0 takes a free port", "network", at_least=0, at_most=65535)
    auth_token_file: str = option(
        "",
        "file with the secret that all services of the cluster share (paceline token FILE makes one); "
        "without it, this service accepts calls from everybody who can connect to it",
        "network",
    )
    advertise: str = option(
        "",
        "address by which other services reach this one; default: --host, or this machine's own if that is 0.0.0.0",
        "network",
    )
    cluster_certfile: str = option(
        "",
        "PEM file with this service's certificate for TLS between services, and any intermediate ones below it. Its "
        "subject alternative names must include the address at which others reach this service, unless "
        "--cluster-cert-name is given. Both sides of a connection show and check certificates. All services of a "
        "cluster must have these options, or none; the files are read again when they change. HTTP clients get the "
        "certificate of --ssl-certfile",
        "cluster",
    )
    cluster_keyfile: str = option("", "PEM file with the private key of --cluster-certfile", "cluster")
    cluster_ca_certs: str = option(
        "",
        "PEM file with the certificates of the authorities that sign the certificates of the cluster's services; every "
        "certificate that they sign lets its owner in, so take an authority of your own for each cluster",
        "cluster",
    )
    cluster_cert_name: str = option(
        "",
        "name that the certificates of all services have, for services whose addresses are not known beforehand, such "
        "as containers; default: a service's certificate must have the address by which it is called",
        "cluster",
    )
    log_level: LogLevel = option("info", "lowest severity of messages that are logged", "logs")
    log_format: LogFormat = option("text", "format of log lines: text for people, json for machines", "logs")
    drain_seconds: float = option(
        30.0,
        "after SIGTERM or Ctrl-C, this service takes no new requests and waits this many seconds for running ones; "
        "then it ends those that still run",
        "limits",
        at_least=0,
        at_most=86400,
    )
    ready_fd: int = option(
        -1, "open file descriptor; this service writes its address there when it is ready", "network"
    )

    @model_validator(mode="after")
    def _check_cluster_files(self) -> Self:
        check_all_or_none(self, "cluster_certfile", "cluster_keyfile", "cluster_ca_certs")
        if self.cluster_cert_name and not self.cluster_certfile:
            raise ConfigError("--cluster-cert-name needs --cluster-certfile")
        return self


class GatewayConfig(ServiceConfig):
    """Options of the HTTP API."""

    port: int = option(8000, "port to listen on", "network", at_least=0, at_most=65535)
    model: str = option("", "Hugging Face folder of the model; its tokenizer and chat template are read", "model")
    served_model_name: str = option(
        "", "name of the model in the API; default: org/name of the hub, or the last part of MODEL", "model"
    )
    chat_template: str = option("", "file with a Jinja chat template, if the model's folder has none", "model")
    generation_config: GenerationConfig = option(
        "auto",
        "sampling parameters of requests that leave them out. auto: those of the model's generation_config.json. none: "
        "OpenAI's defaults. Tokens that end an answer are read from the file either way",
        "model",
    )
    tool_call_parser: str = option(
        "auto",
        "how the model writes tool calls: a form by name, none, or auto for the form that the chat template shows",
        "model",
    )
    reasoning_parser: str = option(
        "auto",
        "how the model marks its reasoning: a form by name, none, or auto for the form that the chat template shows",
        "model",
    )
    score_tokens: str = option(
        "",
        "the two tokens whose probabilities at the end of a prompt give a score of /score and /rerank, separated by a "
        "comma: the one that says that a document fits its query, then the other. Default: yes,no, as Qwen3-Reranker "
        "answers. Both must be single tokens of the model. A score is the probability of the first one among the two",
        "model",
    )
    score_template: str = option(
        "",
        "file with a Jinja template for the prompt of a query and a document, which are messages with these roles, as "
        "in vLLM's score templates; the request's instruction is a message with the role system. Default: the chat "
        "template if it has these roles; if not, the words of Qwen3-Reranker in the model's chat template",
        "model",
    )
    max_logprobs: int = option(
        20,
        "most tokens for which a request may want logprobs at each position; -1 allows the whole vocabulary",
        "limits",
        at_least=-1,
    )
    return_tokens_as_token_ids: bool = option(
        False,
        "logprobs name tokens by id, as token_id:7, because several tokens may have the same text; a request may say "
        "otherwise",
        "model",
    )
    enable_force_include_usage: bool = option(
        False, "every chunk of every stream has the usage so far, whatever the request's stream_options say", "model"
    )
    store: str = option(
        "",
        "where responses of /v1/responses, files and batches are kept: a SQLite file, the URL of an SQL database, "
        "which several gateways may share (needs SQLAlchemy), or none; default: store.db in the cache folder",
        "store",
        is_secret=True,
    )
    stored_responses: int = option(
        10_000,
        "responses that are kept for each API key; the ones that were used longest ago make room",
        "store",
        at_least=1,
    )
    stored_responses_size: Size = option("256MiB", "size of all responses that are kept for each API key", "store")
    stored_responses_seconds: float = option(
        30 * 86400.0, "a response is kept for this many seconds after its last use", "store", at_least=1
    )
    stored_files: int = option(
        1000, "files that each API key may have; an upload that is one too many is refused", "store", at_least=1
    )
    stored_files_size: Size = option("2GiB", "size of all files that each API key may have", "store")
    stored_files_seconds: float = option(
        30 * 86400.0,
        "a file that does not say when it expires is deleted after this many seconds, and a batch this many seconds "
        "after its end",
        "store",
        at_least=1,
    )
    max_file_size: Size = option("200MiB", "largest file that may be uploaded", "store")
    max_batch_lines: int = option(50_000, "requests in one batch", "store", at_least=1)
    max_batches: int = option(
        100,
        "batches of each API key that may run or wait at the same time; a further one is refused",
        "store",
        at_least=1,
    )
    uds: str = option(
        "",
        "path of a Unix socket to listen on, instead of --host and --port; only this user may connect to it",
        "network",
    )
    root_path: str = option(
        "",
        "path, such as /llm, below which a proxy offers this API; requests may have it or have lost it on their way",
        "network",
    )
    ssl_certfile: str = option(
        "",
        "PEM file with the certificate for HTTPS, and any intermediate ones below it; it is read again when it "
        "changes. Default: HTTP in the clear",
        "network",
    )
    ssl_keyfile: str = option("", "PEM file with the private key of --ssl-certfile", "network")
    ssl_ca_certs: str = option(
        "", "PEM file with the certificates of the authorities that sign clients' certificates", "network"
    )
    ssl_cert_reqs: int = option(
        0,
        "whether HTTPS clients show a certificate: 0 none, 1 a client may show one, 2 each client must; one that is "
        "shown must be signed by an authority in --ssl-ca-certs",
        "network",
        at_least=0,
        at_most=2,
    )
    api_key: str = option(
        "",
        "API keys of clients, separated by commas; default: $PACELINE_API_KEY. Other users of the machine see a "
        "command line, but neither the environment nor --api-keys-file. Without any key of a client, clients need none",
        "network",
        is_secret=True,
    )
    admin_key: str = option(
        "",
        "keys of admins, separated by commas; default: $PACELINE_ADMIN_KEY. Without any key of an admin, the fleet, "
        "scaling and requests of others are for processes of this machine only",
        "network",
        is_secret=True,
    )
    api_keys_file: str = option(
        "",
        "TOML file with a table for each key: its sha256 (paceline key makes both), role, priority and limits. Only "
        "its owner may be able to read it. It is read again when it changes",
        "network",
    )
    classes_file: str = option(
        "",
        "TOML file with a table for each class of requests: its objectives (ttft_seconds, itl_seconds), and the "
        "weight of its keys in the queue. A key of --api-keys-file names its class; all other requests have the class "
        "default",
        "limits",
    )
    record_trace: str = option(
        "",
        "file to which a line is written for each request that ends: when it came, its lengths, hashes of its blocks, "
        "but no text. paceline simulate reads it",
        "logs",
    )
    record_trace_size: Size = option(
        "256MiB", "size of the file of --record-trace and of the older one, FILE.1, together", "logs"
    )
    allowed_origins: str = option(
        "",
        "origins whose web pages may call the API from a browser (CORS), separated by commas, such as "
        "https://chat.example.com; * allows all. Default: none but the gateway's own",
        "network",
    )
    allowed_methods: str = option("*", "methods that these pages may use, separated by commas", "network")
    allowed_headers: str = option("*", "headers that these pages may send, separated by commas", "network")
    allow_credentials: bool = option(
        False, "these pages may use a key that the browser itself keeps; needs named origins", "network"
    )
    max_body_bytes: int = option(32 << 20, "largest request body in bytes; larger ones get 413", "limits", at_least=1)
    max_waiting: int = option(256, "requests that may wait for a worker; further ones get 429", "limits", at_least=1)
    queue_seconds: float = option(
        60.0,
        "a request that has waited this many seconds for a worker gets 429, or 503 if no worker could be reached",
        "limits",
        at_least=0.1,
    )
    request_seconds: float = option(
        1800.0, "a request that takes more than this many seconds from arrival to end fails", "limits", at_least=0.1
    )
    stall_seconds: float = option(
        120.0,
        "a worker that has sent nothing for this many seconds counts as failed, and its requests move to another "
        "worker. A worker sends nothing during a step that takes more than a second, so this must be longer than the "
        "longest step (see --max-batched-tokens)",
        "limits",
        at_least=0.1,
    )
    router_mode: RouterMode = option(
        "kv",
        "how the gateway chooses workers. kv: by their cached prefixes, queues and load, and the time to transfer "
        "blocks. round-robin: each worker in turn",
        "cluster",
    )
    local_prefill_tokens: int = option(
        32,
        "a decode worker may compute a prompt itself if at most this many uncached prompt tokens, those of waiting "
        "prompts included, then wait there, and if this costs less than a prefill worker; the delay of the requests "
        "that it decodes counts. 0 sends all prompts to prefill workers, if there are any",
        "limits",
        at_least=0,
    )
    allowed_media_domains: str = option(
        "",
        "servers from which images, videos and audio may be fetched, as names separated by commas; .example.com allows "
        "all names below example.com, none allows no server. Default: every server with a public address",
        "media",
    )
    allow_private_media: bool = option(
        False,
        "media may be fetched from servers with private addresses, this machine included, and from every port; without "
        "it only from public addresses and from ports 80, 443, 8080 and 8443. With it, a client can read whatever the "
        "servers in your network answer to a GET",
        "media",
    )
    allowed_local_media_path: str = option(
        "", "folder whose files clients may name as file: URLs; default: no file: URL is allowed", "media"
    )
    limit_mm_per_prompt: str = option(
        "",
        'how many items of each kind a request may have, as JSON, such as {"image": 4, "video": 1, "audio": 0}; a kind '
        "that is left out is limited by --max-media-items alone",
        "media",
    )
    mm_processor_kwargs: str = option(
        "",
        'options of the model\'s preprocessing, as JSON, for requests without their own, such as {"max_soft_tokens": '
        '560}, the most tokens that Gemma 4 sees of an image, or {"max_pixels": 1048576} for Qwen 3-VL',
        "media",
    )
    media_cache_size: Size = option(
        "256MiB",
        "memory for preprocessed media that clients have named by a uuid, so that they need not send them again",
        "media",
    )
    max_media_items: int = option(64, "images, videos and audio clips in one request", "media", at_least=0)
    max_media_size: Size = option("64MiB", "largest file of an image, a video or an audio clip", "media")
    media_memory: Size = option(
        "2GiB",
        "memory for media that are being fetched and decoded, and for what is kept of them until their requests end. "
        "One request may use half of it. The items that the processes decode may use the other half, each an equal "
        "share of it. A request that finds it full gets 429",
        "media",
    )
    max_image_pixels: int = option(
        64 << 20, "largest image, and largest frame of a video, in pixels", "media", at_least=1
    )
    max_video_seconds: float = option(600.0, "longest video in seconds", "media", at_least=0.1)
    max_audio_seconds: float = option(1800.0, "longest audio clip in seconds", "media", at_least=0.1)
    image_fetch_seconds: float = option(
        5.0, "an image must have arrived this many seconds after the gateway began to fetch it", "media", at_least=0.1
    )
    video_fetch_seconds: float = option(
        30.0, "a video must have arrived this many seconds after the gateway began to fetch it", "media", at_least=0.1
    )
    audio_fetch_seconds: float = option(
        10.0,
        "an audio clip must have arrived this many seconds after the gateway began to fetch it",
        "media",
        at_least=0.1,
    )
    media_decode_seconds: float = option(
        30.0,
        "an item that is not decoded after this many seconds is refused. It may wait as long for a process; then its "
        "request gets 429",
        "media",
        at_least=0.1,
    )
    media_processes: int = option(
        2,
        "processes that decode media, one item at a time each; they start when the first item comes. Videos and audio "
        "leave one of them free for images, if there are two or more",
        "media",
        at_least=1,
    )
    vllm_metric_names: bool = option(
        False,
        "/metrics also has vLLM's names for what vLLM measures, too (vllm:num_requests_running …), so that dashboards "
        "and autoscalers that were made for vLLM work unchanged",
        "logs",
    )
    supervisor_socket: str = option("", "Unix socket of the supervisor, which adds and removes workers", "network")
    max_attempts: int = option(
        5,
        "a request is given up after this many failures at one step for a reason of its own: a worker answers with "
        "an error and goes on, or workers end where this request runs and nowhere else. Otherwise it goes on until its "
        "deadline (--request-seconds)",
        "limits",
        at_least=1,
    )

    @model_validator(mode="after")
    def _check_http(self) -> GatewayConfig:
        check_http(self)
        return self


class WorkerConfig(ServiceConfig):
    """Options of a prefill, decode or encode worker."""

    model: str = option("", "Hugging Face folder of the model", "model")
    dtype: DType = option("auto", "type of weights, activations and KV; auto takes the checkpoint's", "model")
    packed_dir: str = option(
        "",
        "folder in which the workers of a host share one copy of the packed weights; default: each worker has its own "
        "copy in memory. Quantized weights are not shared",
        "model",
    )
    quantization: Quantization = option(
        "none",
        "format of the model's matrices in memory. none: the type of --dtype. int8: blocks of signed bytes, to which "
        "the matrices are rounded. gguf: the blocks of the GGUF file from which the model was converted",
        "model",
    )
    model_impl: ModelImpl = option(
        "auto",
        "code that computes the model. native: Paceline's own, which is faster and has the architectures that are "
        "native in docs/architectures.md. transformers: the model's code in the package transformers, with Paceline's "
        "attention and matrix products. auto: native if it has the model's architecture, else transformers",
        "model",
    )
    trust_remote_code: bool = option(
        False,
        "with --model-impl auto or transformers: run the Python code in the model's folder if its config.json names "
        "such code (auto_map). It can do whatever the user of this process can do. Native models never need it",
        "model",
    )
    max_model_len: int = option(
        0,
        "longest context in tokens (prompt and output); 0 takes the model's limit, or less if the KV memory is too "
        "small for it",
        "model",
        at_least=0,
    )
    kvtransfer_address: str = option("127.0.0.1:7300", "address of this host's kvtransfer service", "network")
    worker_id: str = option("", "unique name of this worker; default: a generated name", "cluster")
    max_seqs: int = option(
        64,
        "sequences that one worker runs at the same time; further ones wait in the gateway's queue",
        "limits",
        at_least=1,
    )
    max_batched_tokens: int = option(
        512,
        "tokens that one step computes at most, over all sequences; longer prompts take several steps, but an image "
        "whose tokens see each other is computed in one step",
        "limits",
        at_least=1,
    )
    device: str = option("cpu", "torch device to compute on: cpu, cuda, or cuda:1 for the second GPU", "compute")
    kv_pool: KVPool = option(
        "auto",
        "memory that holds the KV blocks of running requests. arena: the worker reads and writes blocks directly in "
        "the memory that all workers of the host share (--kv-memory of kvtransfer). device: the worker has a pool of "
        "its own on its device and copies blocks between the pool and the shared memory; if the pool is full, requests "
        "are swapped out to the shared memory. auto: arena on a CPU, device on a GPU",
        "memory",
    )
    kv_pool_memory: AutoSize = option(
        "auto",
        "size of the worker's own pool, e.g. 4GiB; auto has room for 24,576 tokens or the longest context, whichever "
        "is more",
        "memory",
    )
    kernels: str = option(
        "auto",
        "kernels to compute with. native: C++, for CPUs. reference: plain torch, slow. triton: for GPUs. "
        "triton-invariant: triton, but a result does not depend on the other requests of a step. auto: native on a "
        "CPU, triton on a GPU, reference if these are not available",
        "compute",
    )
    threads: int = option(0, "CPU threads; 0 takes all cores that the worker may use", "compute", at_least=0)
    itl_target_ms: float = option(
        0.0,
        "intended time between two tokens of a running request, in milliseconds. It matters only while prompts wait "
        "and prefill and decode workers share the cores of a host: prefill gets the part of this time that a decode "
        "step leaves. A lower target makes running requests faster and first tokens later. 0 follows the machine: 28 "
        "ms, or two and a half decode steps if that is longer",
        "compute",
        at_least=0,
    )
    async_scheduling: bool = option(
        True,
        "plan and launch the next step while the present one computes, so that the device does not wait between "
        "steps. Tokens are the same either way; turn it off only to compare or to debug",
        "compute",
    )
    speculative_config: str = option(
        "",
        "JSON object that turns on speculative decoding, which drafts tokens and verifies several in one step, e.g. "
        '{"method": "ngram", "num_speculative_tokens": 4}\n' + speculative_help(),
        "compute",
    )

    @model_validator(mode="after")
    def _check_together(self) -> WorkerConfig:
        check_step_size(self.max_batched_tokens, self.max_seqs)
        check_model_code(self)
        return self


class KVTransferConfig(ServiceConfig):
    """Options of the service that owns a host's KV memory."""

    port: int = option(7300, "port to listen on; 0 takes a free port", "network", at_least=0, at_most=65535)
    kv_memory: AutoSize = option(
        "auto",
        "size of the memory for KV blocks that the workers of a host share, e.g. 4GiB; auto has room for 24,576 tokens "
        "or the longest context, whichever is more, but takes at most 2 GiB and at most a quarter of the free memory",
        "memory",
    )
    kv_disk_size: Size = option(
        "",
        "size of a file for blocks that the shared memory evicts, e.g. 64GiB, allocated at the start; default: no file",
        "memory",
    )
    kv_disk_dir: str = option("/var/tmp", "folder for the file of --kv-disk-size, on a fast disk", "memory")
    cache_policy: str = option(
        "adaptive",
        "policy that chooses which cached block the shared memory evicts. adaptive: the block that is least likely to "
        "be requested soon, by forecast or arc, whichever finds more. Others are forecast, arc, lru and the names of "
        "installed policies",
        "memory",
    )
    arena_dir: str = option("/dev/shm", "folder of the shared memory; all workers of the host must see it", "memory")
    transport: TransportChoice = option(
        "auto",
        "how KV blocks are copied between hosts. grpc: over gRPC. ucx: over UCX (RDMA or TCP), which listens on all "
        "addresses of the machine. auto: ucx if it is installed, works, and --host is not a local address; else grpc, "
        "and grpc with --cluster-certfile, because UCX copies in the clear",
        "network",
    )
    host_id: str = option(
        "",
        "unique name of this host. If kvtransfer was killed, one that is started again with the same name takes over "
        "the KV memory, and running requests continue; default: a generated name, so a restart begins empty",
        "cluster",
    )
    lease_seconds: float = option(
        10.0,
        "a lease that its worker has not renewed for this many seconds ends: the worker stops the request and the "
        "gateway starts a new attempt. Blocks are given out again only when the worker has let go of them or has "
        "ended. Workers renew three times within this time",
        "limits",
        at_least=0.1,
    )


class ServeConfig(PlannerOptions):
    """Options of a whole stack on one machine."""

    model: str = option(
        "smollm2-135m-instruct",
        "bundled name, Hugging Face folder, GGUF file, or a model of the Hugging Face hub: org/name or "
        "org/name/file.gguf. A folder or file of this machine takes precedence over the hub",
        "model",
    )
    revision: str = option("", "branch, tag or commit of a model on the hub; default: its main branch", "model")
    served_model_name: str = same_option(GatewayConfig, "served_model_name")
    dtype: DType = same_option(WorkerConfig, "dtype")
    quantization: Quantization = same_option(WorkerConfig, "quantization")
    model_impl: ModelImpl = same_option(WorkerConfig, "model_impl")
    trust_remote_code: bool = same_option(WorkerConfig, "trust_remote_code")
    max_model_len: int = same_option(WorkerConfig, "max_model_len")
    chat_template: str = same_option(GatewayConfig, "chat_template")
    generation_config: GenerationConfig = same_option(GatewayConfig, "generation_config")
    tool_call_parser: str = same_option(GatewayConfig, "tool_call_parser")
    reasoning_parser: str = same_option(GatewayConfig, "reasoning_parser")
    score_tokens: str = same_option(GatewayConfig, "score_tokens")
    score_template: str = same_option(GatewayConfig, "score_template")
    max_logprobs: int = same_option(GatewayConfig, "max_logprobs", group="model")
    return_tokens_as_token_ids: bool = same_option(GatewayConfig, "return_tokens_as_token_ids")
    enable_force_include_usage: bool = same_option(GatewayConfig, "enable_force_include_usage")
    cache_dir: str = option(str(env.default_cache_dir()), "folder that keeps converted models", "model")
    prefill: int = option(1, "prefill workers; with 0, decode workers compute all prompts", "fleet", at_least=0)
    decode: int = option(1, "decode workers; 0 only with --planner", "fleet", at_least=0)
    encode: int = option(
        0,
        "encode workers, which compute only the encodings of images, videos and audio; with 0, the workers that "
        "compute prompts do it",
        "fleet",
        at_least=0,
    )
    planner: bool = option(
        False,
        "let a planner add and drain workers, from --prefill and --decode on, so that requests meet the objectives of "
        "--ttft-seconds and --itl-seconds",
        "fleet",
    )
    kv_pool: KVPool = same_option(
        WorkerConfig, "kv_pool", help=help_of(WorkerConfig, "kv_pool").replace(" of kvtransfer", ""), group="fleet"
    )
    kv_memory: AutoSize = same_option(KVTransferConfig, "kv_memory", group="fleet")
    kv_pool_memory: AutoSize = same_option(
        WorkerConfig,
        "kv_pool_memory",
        help="with --kv-pool device, " + help_of(WorkerConfig, "kv_pool_memory"),
        group="fleet",
    )
    kv_disk_size: Size = same_option(KVTransferConfig, "kv_disk_size", group="fleet")
    kv_disk_dir: str = same_option(KVTransferConfig, "kv_disk_dir", group="fleet")
    cache_policy: str = same_option(KVTransferConfig, "cache_policy", group="fleet")
    local_prefill_tokens: int = same_option(GatewayConfig, "local_prefill_tokens", group="fleet")
    max_seqs: int = same_option(WorkerConfig, "max_seqs", group="fleet")
    max_batched_tokens: int = same_option(WorkerConfig, "max_batched_tokens", group="fleet")
    device: str = same_option(WorkerConfig, "device", group="fleet")
    kernels: str = same_option(WorkerConfig, "kernels", group="fleet")
    threads: int = same_option(WorkerConfig, "threads", group="fleet")
    itl_target_ms: float = same_option(WorkerConfig, "itl_target_ms", group="fleet")
    async_scheduling: bool = same_option(WorkerConfig, "async_scheduling", group="fleet")
    speculative_config: str = same_option(WorkerConfig, "speculative_config", group="fleet")
    host: str = same_option(GatewayConfig, "host", help="address of the HTTP API")
    port: int = same_option(GatewayConfig, "port", help="port of the HTTP API; 0 takes a free port")
    uds: str = same_option(GatewayConfig, "uds")
    root_path: str = same_option(GatewayConfig, "root_path")
    ssl_certfile: str = same_option(GatewayConfig, "ssl_certfile")
    ssl_keyfile: str = same_option(GatewayConfig, "ssl_keyfile")
    ssl_ca_certs: str = same_option(GatewayConfig, "ssl_ca_certs")
    ssl_cert_reqs: int = same_option(GatewayConfig, "ssl_cert_reqs")
    api_key: str = same_option(GatewayConfig, "api_key")
    admin_key: str = same_option(GatewayConfig, "admin_key")
    api_keys_file: str = same_option(GatewayConfig, "api_keys_file")
    classes_file: str = same_option(GatewayConfig, "classes_file")
    record_trace: str = same_option(GatewayConfig, "record_trace")
    record_trace_size: Size = same_option(GatewayConfig, "record_trace_size")
    allowed_origins: str = same_option(GatewayConfig, "allowed_origins")
    allowed_methods: str = same_option(GatewayConfig, "allowed_methods")
    allowed_headers: str = same_option(GatewayConfig, "allowed_headers")
    allow_credentials: bool = same_option(GatewayConfig, "allow_credentials")
    store: str = same_option(GatewayConfig, "store")
    limit_mm_per_prompt: str = same_option(GatewayConfig, "limit_mm_per_prompt")
    mm_processor_kwargs: str = same_option(GatewayConfig, "mm_processor_kwargs")
    allowed_media_domains: str = same_option(GatewayConfig, "allowed_media_domains")
    allow_private_media: bool = same_option(GatewayConfig, "allow_private_media")
    allowed_local_media_path: str = same_option(GatewayConfig, "allowed_local_media_path")
    redis: str = option("", "URL of a Redis server to use; default: this command starts one", "network", is_secret=True)
    vllm_metric_names: bool = same_option(GatewayConfig, "vllm_metric_names")
    log_level: LogLevel = same_option(ServiceConfig, "log_level", default="warning")
    log_format: LogFormat = same_option(ServiceConfig, "log_format")
    drain_seconds: float = same_option(ServiceConfig, "drain_seconds", default=10.0)

    @model_validator(mode="after")
    def _check_together(self) -> ServeConfig:
        check_step_size(self.max_batched_tokens, self.max_seqs)
        check_model_code(self)
        check_http(self)
        if self.planner:
            self.objectives({})
        if not (self.decode or self.planner):
            raise ConfigError("--decode must be at least 1 without --planner, which starts workers when requests come")
        if has_pools(self) and self.kv_pool_memory == "auto" != self.kv_memory:
            raise ConfigError(
                "with --kv-pool device, --kv-memory is the size of the shared memory below the pools and not, as "
                "earlier, of each worker's pool: give --kv-pool-memory, too"
            )
        if not has_pools(self) and self.kv_pool_memory != "auto":
            raise ConfigError(
                "--kv-pool-memory needs --kv-pool device; without it, workers compute in the shared memory, whose size "
                "is --kv-memory"
            )
        return self


PREPARE_OPTIONS = ("revision", "cache_dir", "quantization", "model_impl", "trust_remote_code")
"""Options of `serve` that its command `prepare` also has."""


def has_pools(config: WorkerConfig | ServeConfig) -> bool:
    """Return whether each worker computes in a pool of its own, rather than in the arena."""
    return config.kv_pool == "device" or (config.kv_pool == "auto" and config.device.partition(":")[0] != "cpu")


def check_step_size(max_batched_tokens: int, max_seqs: int) -> None:
    """Raise ConfigError if a step may have fewer tokens than sequences."""
    if max_batched_tokens < max_seqs:
        raise ConfigError(
            f"--max-batched-tokens {max_batched_tokens} is less than --max-seqs {max_seqs}: "
            "each step computes a token of every running sequence; raise the first or lower the second"
        )


def check_all_or_none(config: Options, *names: str) -> None:
    """Raise ConfigError if some of the options `names` are given and others are not."""
    given = [name for name in names if getattr(config, name)]
    if given and len(given) < len(names):
        missing = next(name for name in names if name not in given)
        raise ConfigError(f"{flag(given[0])} needs {flag(missing)}")


def check_http(config: GatewayConfig | ServeConfig) -> None:
    """Raise ConfigError if the options of the HTTP server contradict each other."""
    check_all_or_none(config, "ssl_certfile", "ssl_keyfile")
    if config.ssl_ca_certs and not config.ssl_certfile:
        raise ConfigError("--ssl-ca-certs needs --ssl-certfile")
    if bool(config.ssl_cert_reqs) != bool(config.ssl_ca_certs):
        raise ConfigError(
            "--ssl-cert-reqs 1 or 2 needs --ssl-ca-certs, and the other way round: one says whether clients show "
            "certificates, the other who must have signed them"
        )
    if config.root_path and (not config.root_path.startswith("/") or config.root_path.endswith("/")):
        raise ConfigError(f"--root-path must begin with / and not end with it, not be {config.root_path!r}")


def check_model_code(config: WorkerConfig | ServeConfig) -> None:
    """Raise ConfigError if --model-impl contradicts other options."""
    if config.trust_remote_code and config.model_impl == "native":
        raise ConfigError(
            "--trust-remote-code needs --model-impl auto or transformers; native models need no such code"
        )
    if config.quantization == "gguf" and config.model_impl == "transformers":
        raise ConfigError(
            "--quantization gguf needs --model-impl native or auto; with transformers, choose int8 or none"
        )
