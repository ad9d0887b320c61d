"""Options of the gateway."""

from __future__ import annotations

from pydantic import model_validator

from paceline.core.adapters import adapter_folders
from paceline.core.config.http import HttpOptions
from paceline.core.config.service import GenerationConfig, RouterMode, ServiceConfig
from paceline.core.errors import ConfigError
from paceline.core.options import Size, option
from paceline.core.pooling_choice import Convert


class GatewayConfig(ServiceConfig, HttpOptions):
    """Options of the gateway."""

    port: int = option(8000, "port to listen on", "network", at_least=0, at_most=65535)
    model: str = option("", "Hugging Face folder of the model; its tokenizer and chat template are read", "model")
    served_model_name: str = option(
        "", "name of the model in the API; default: org/name of the hub, or the last part of MODEL", "model"
    )
    models_file: str = option(
        "",
        "TOML file with a table for each model, instead of MODEL: its heading is the name in the API, its keys are "
        "options of this model, above all model and cluster",
        "model",
    )
    chat_template: str = option(
        "", "file with a Jinja chat template, which replaces all templates of the model", "model"
    )
    shared_prompts: str = option(
        "",
        "TOML file with a table for each text, such as a system prompt, whose cached blocks all keys share if their "
        "prompts begin with it: text, or file, which names a file beside this one. All gateways need the same file",
        "model",
    )
    generation_config: GenerationConfig = option(
        "auto",
        "sampling parameters of requests that leave them out. auto: those of the model's generation_config.json. none: "
        "OpenAI's defaults. Tokens that end an answer are read from the file either way",
        "model",
    )
    tool_call_parser: str = option(
        "auto",
        "form of the model's tool calls: a form by name, none, or auto for the form that the chat template shows",
        "model",
    )
    reasoning_parser: str = option(
        "auto",
        "form of the model's reasoning: a form by name, none, or auto for the form that the chat template shows",
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
    convert: Convert = option(
        "auto",
        "auto: the model's folder says whether it makes vectors, scores or labels. embed: a model that only generates "
        "makes vectors, too, as --pooler-config says; they are good only if it was trained for it. score: such a model "
        "ranks by the logits of yes and no after its prompt, as Qwen3-Reranker does",
        "model",
    )
    pooler_config: str = option(
        "",
        "JSON object that says how vectors are made with --convert embed. Default: "
        '{"pooling_type": "LAST", "normalize": true}. pooling_type: LAST, MEAN or CLS',
        "model",
    )
    enable_lora: bool = option(
        False,
        "requests may name adapters (LoRA), which gateways and workers read from folders that PEFT has written "
        "(docs/adapters.md)",
        "model",
    )
    lora_modules: str = option(
        "",
        "adapters by name: NAME=FOLDER,OTHER=FOLDER, or JSON objects with name and path. A request names an adapter as "
        "its model. serve and prepare also take names on the hub: org/name, or org/name@revision",
        "model",
    )
    lora_dir: str = option(
        "",
        "folder whose subfolders are adapters, each with the name of its subfolder. Subfolders that come, change or go "
        "are followed while the gateway runs",
        "model",
    )
    max_logprobs: int = option(
        20,
        "most tokens for which a request may want logprobs at each position; -1 allows the whole vocabulary",
        "limits",
        at_least=-1,
    )
    constraint_seconds: int = option(
        2,
        "CPU time in seconds within which a schema, grammar or set of tools must compile. It is compiled on trial in a "
        "process of its own, which ends at the limit. Then the request gets 400, and no worker sees it",
        "limits",
        at_least=1,
    )
    constraint_memory: Size = option(
        "256MiB",
        "memory within which a schema, grammar or set of tools must compile; see --constraint-seconds",
        "limits",
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
    max_text_characters: int = option(
        0,
        "longest text that is tokenized at once, such as a prompt or a conversation, in characters. 0: a million, or "
        "eight for each token of the model's context if these are more",
        "limits",
        at_least=0,
    )
    store: str = option(
        "",
        "place of the responses of /v1/responses, files and batches: a SQLite file, the URL of an SQL database, "
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
    max_conversation_size: Size = option(
        "64MiB",
        "largest conversation that a response continues by previous_response_id, conversation or references, as JSON; "
        "it is read into memory",
        "store",
    )
    stored_files: int = option(
        1000, "files that each API key may have; an upload that is one too many is refused", "store", at_least=1
    )
    stored_files_size: Size = option(
        "2GiB", "size of all files that each API key may have, and of the answers of one batch", "store"
    )
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
    classes_file: str = option(
        "",
        "TOML file with a table for each class of requests: its objectives (ttft_seconds, itl_seconds), and the "
        "weight of its keys in the queue. A key of --api-keys-file names its class; all other requests have the class "
        "default",
        "limits",
    )
    sleep_after: float = option(
        0.0,
        "a model that nobody has used for this many seconds sleeps: its workers give back the memory of weights and KV "
        "blocks. The next request wakes it, and waits meanwhile, up to --queue-seconds. 0: models sleep only when an "
        "operator says so (POST /sleep)",
        "model",
        at_least=0,
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
        "rule by which the gateway chooses workers. kv: by their cached prefixes, queues and load, and the time to "
        "transfer blocks. round-robin: each worker in turn",
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
        'largest numbers of items by kind in a request, as JSON, such as {"image": 4, "video": 1, "audio": 0}; a '
        "kind that is left out is limited by --max-media-items alone",
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
        "processes that decode media, one item at a time each. One starts with a gateway whose model takes media, the "
        "others when items come. Videos and audio leave one of them free for images, if there are two or more",
        "media",
        at_least=1,
    )
    vllm_metric_names: bool = option(
        False,
        "/metrics also has vLLM's metrics under vLLM's names (vllm:num_requests_running …), so that dashboards "
        "and autoscalers that were made for vLLM work unchanged",
        "logs",
    )
    supervisor_socket: str = option("", "Unix socket of the supervisor, which adds and removes workers", "network")
    max_attempts: int = option(
        5,
        "a request is given up after this many failures at one step for a reason of its own: a worker answers with "
        "an error and goes on, or a worker ends while it runs the request and nothing else in the fleet explains this. "
        "Other trouble explains at most 20 ends. Otherwise the request goes on until its deadline (--request-seconds)",
        "limits",
        at_least=1,
    )

    @model_validator(mode="after")
    def _check_adapters(self) -> GatewayConfig:
        adapter_folders(self)
        if self.lora_dir and not self.enable_lora:
            raise ConfigError("--lora-dir needs --enable-lora")
        return self
