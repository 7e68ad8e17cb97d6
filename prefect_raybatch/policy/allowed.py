"""The built-in allow lists: what any job may set. docs/security.md shows the same lists.

A job may set anything else only if the operator (who runs the flows or the job server) allows it in
the file that `RAYBATCH_POLICY` names.
"""

from __future__ import annotations

import re

# Environment variables that a job may set for the engine. None of them names code, a file or a
# host. A `*` at the end stands for any ending.
ENGINE_VARIABLES = (
    "VLLM_ATTENTION_BACKEND",
    "VLLM_BATCH_INVARIANT",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_NUM_OF_RESERVED_CPU",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_LOGGING_LEVEL",
    "VLLM_USE_DEEP_GEMM",
    "VLLM_USE_FLASHINFER_SAMPLER",
    "VLLM_USE_V1",
    "VLLM_WORKER_MULTIPROC_METHOD",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_DISABLE_XET",
    "HF_HUB_ENABLE_HF_TRANSFER",
    "HF_HUB_OFFLINE",
    "HF_TOKEN",
    "MKL_NUM_THREADS",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "RAY_DEDUP_LOGS",
    "TOKENIZERS_PARALLELISM",
    "TORCH_CPP_LOG_LEVEL",
    "TRANSFORMERS_OFFLINE",
    "TRANSFORMERS_VERBOSITY",
    "TZ",
)

# What a value of such a variable may be: no path, no module (`ext://os` of Python's logging).
VARIABLE_VALUE = r"[^/\\\x00-\x1f\x7f]*"
VARIABLE_VALUES = {  # in which a / is no path
    "CUDA_VISIBLE_DEVICES": r"[A-Za-z0-9,-][A-Za-z0-9,/-]*|",
    "TZ": r"(?!.*\.\.)[A-Za-z0-9<][A-Za-z0-9_+<>,./-]*|",
}

# Engine arguments (`a.b` for field b of the mapping a) that vLLM types as text, or that cannot be
# judged by their type, with the values that any job may give.
WORD = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
ENGINE_TEXTS = {
    "attention_backend": r"[A-Z][A-Z0-9_]*",
    "attention_config.backend": r"[A-Z][A-Z0-9_]*",
    "code_revision": WORD,
    "compilation_config.cudagraph_mode": r"[A-Z_]+",
    "compilation_config.mode": r"[A-Z_]+",
    "config_format": r"auto|hf|mistral",
    "distributed_executor_backend": r"ray|mp|uni",
    "generation_config": r"auto|vllm",
    "hf_token": r"hf_[A-Za-z0-9]+",
    "kv_cache_dtype": r"try-fp8",
    "load_format": r"auto|hf|safetensors|fastsafetensors|dummy|gguf|bitsandbytes|mistral",
    "lora_dtype": r"auto|float16|bfloat16",
    "mamba_backend": r"[A-Z_a-z]+",
    "mm_encoder_attn_backend": r"[A-Z][A-Z0-9_]*",
    "model_impl": r"auto|vllm",
    "offload_backend": r"auto|uva|prefetch",
    "optimization_level": r"O[0-3]",
    "quantization": r"[a-z0-9][a-z0-9_-]*",
    "reasoning_parser": r"[a-z0-9][a-z0-9_]*",
    "served_model_name": r"[A-Za-z0-9][A-Za-z0-9_. -]*",
    "structured_outputs_config.reasoning_parser": r"[a-z0-9_]*",
    "tokenizer_mode": r"auto|hf|slow|mistral",
    "tokenizer_revision": WORD,
    "video_pruning_method": r"[a-z0-9_]+",
    "worker_cls": r"auto",
}

# Switches that do more than their type says, also inside mappings: they run a model's code, open a
# port on all interfaces that sends the tokens of rows, and start a program beside the engine.
ENGINE_CODE = ("trust_remote_code", "enable_kv_cache_events", "ray_workers_use_nsight")

# Engine arguments that name a file, a host or a free mapping, but no code. The owner of a job may
# set them; for a job that arrives from elsewhere the operator has to allow each.
OWNER_ARGUMENTS = (
    "additional_config",
    "allowed_local_media_path",
    "allowed_media_domains",
    "cpu_offload_params",
    "default_mm_loras",
    "download_dir",
    "generation_config",
    "hf_overrides",
    "hf_token",
    "ignore_patterns",
    "load_format",
    "lora_target_modules",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "model_loader_extra_config",
    "offload_params",
    "otlp_traces_endpoint",
    "override_generation_config",
    "pooler_config",
    "profiler_config",
    "quantization",
    "quantization_config",
    "served_model_name",
    "speculative_config.revision",
    "tokenizer",
    "tokenizer_mode",
)

# Texts that the owner may set as well. Other texts for the same argument can name a class.
OWNER_TEXTS = {
    "speculative_config.model": r"\[?ngram\]?|suffix|((s3|gs|az)://|[./~]).*/.*|[\w-][\w.-]*/[\w.-]+",
    "speculative_config.quantization": r"[a-z0-9][a-z0-9_-]*",
}

# Names of variables that hold secrets and that a job may name: `options.password_env`, `${NAME}`.
SECRETS = ("RAYBATCH_SECRET_*",)

# Store options (s3fs, obstore) that a job from elsewhere may set; hosts in them are checked too.
STORE_OPTIONS = frozenset(
    (
        *("addressing_style", "anon", "client_kwargs", "config_kwargs", "connect_timeout"),
        *("account_key", "account_name", "base_url", "bearer_token", "endpoint", "sas_key"),
        *("skip_signature", "default_block_size", "endpoint_url", "headers", "key", "max_attempts"),
        *("max_concurrency", "max_pool_connections", "mode", "password", "password_env"),
        *("read_timeout", "region", "region_name", "requester_pays", "retries", "s3", "secret"),
        *("signature_version", "token", "token_env", "total_max_attempts", "use_ssl", "username"),
        "username_env",
    )
)

# Properties of a catalog that a job from elsewhere may set; hosts and folders in them are checked.
CATALOG_PROPERTIES = frozenset(
    (
        *("credential", "name", "oauth2-server-uri", "prefix", "scope", "token", "type", "uri"),
        *("warehouse", "s3.access-key-id", "s3.endpoint", "s3.region", "s3.secret-access-key"),
        "s3.session-token",
    )
)

# Options and properties that become part of a host's name, and what they may be.
REGION_NAMES = ("region", "region_name", "s3.region")
REGION = r"[A-Za-z0-9-]+"

# Parameters of a database's URL that a job from elsewhere may set.
DATABASE_PARAMETERS = frozenset(
    ("application_name", "charset", "connect_timeout", "mode", "sslmode", "uri")
)

# Fields of a RayCluster's manifest, by what holds them. A path, a device or the host's own
# namespaces are not among them.
CLUSTER_FIELDS = frozenset(
    ("enableInTreeAutoscaling", "headGroupSpec", "rayVersion", "suspend", "workerGroupSpecs")
)
GROUP_FIELDS = frozenset(
    (
        *("groupName", "idleTimeoutSeconds", "maxReplicas", "minReplicas", "numOfHosts"),
        *("rayStartParams", "replicas", "resources", "scaleStrategy", "template"),
    )
)
POD_FIELDS = frozenset(
    (
        *("activeDeadlineSeconds", "affinity", "automountServiceAccountToken", "containers"),
        *("dnsPolicy", "enableServiceLinks", "imagePullSecrets", "initContainers", "nodeSelector"),
        *("preemptionPolicy", "restartPolicy", "securityContext", "serviceAccountName"),
        *("terminationGracePeriodSeconds", "tolerations", "topologySpreadConstraints", "volumes"),
    )
)
VOLUME_KINDS = frozenset(
    ("configMap", "downwardAPI", "emptyDir", "persistentVolumeClaim", "secret")
)
CONTAINER_FIELDS = frozenset(
    (
        *("args", "command", "env", "envFrom", "image", "imagePullPolicy", "lifecycle"),
        *("livenessProbe", "name", "ports", "readinessProbe", "resources", "securityContext"),
        *("startupProbe", "volumeMounts", "workingDir"),
    )
)
# Metadata of a pod. Controllers act on labels and annotations, with rights of their own.
METADATA_FIELDS = frozenset(("annotations", "creationTimestamp", "labels"))
POD_ANNOTATIONS = (
    *("cluster-autoscaler.kubernetes.io/*", "kubectl.kubernetes.io/*", "kueue.x-k8s.io/*"),
    *("prometheus.io/*", "ray.io/*"),
)
POD_LABELS = (
    "app.kubernetes.io/*",
    "kueue.x-k8s.io/*",
    "ray.io/*",
)  # beside those without a prefix
REFUSED_LABELS = ("aadpodidbinding",)  # no prefix, but gives the pod an identity
# Where the value of a container's variable may come from.
VARIABLE_SOURCES = frozenset(("configMapKeyRef", "fieldRef", "resourceFieldRef", "secretKeyRef"))
SECURITY_FIELDS = {  # of a securityContext, and which values are allowed; None: any
    "allowPrivilegeEscalation": (False,),
    "fsGroup": None,
    "readOnlyRootFilesystem": None,
    "runAsGroup": None,
    "runAsNonRoot": None,
    "runAsUser": None,
    "supplementalGroups": None,
}
RESERVED_NAMESPACES = re.compile(r"kube-.*|gke-.*|istio-system|cert-manager|calico-system")
