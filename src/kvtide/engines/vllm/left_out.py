"""What of vLLM's configuration does not count in a fingerprint, and why, name by name.

Of each config dataclass everything counts but the names listed here, so a field that another
version of vLLM adds counts until somebody decides otherwise: counting too much keeps two engines
from sharing, and `kvtide status` names the field; counting too little could make a hit wrong.

A test compares these names with the vLLM that is installed, so none of them can outlive its field.
"""

CONFIG_LEFT_OUT = frozenset(
    {
        # batches and requests: the KV of a token does not depend on them
        "scheduler_config",
        "structured_outputs_config",
        "reasoning_config",
        "watermark_config",
        # where weights lie and how they come: the weights digest says what they are
        "load_config",
        "offload_config",
        "weight_transfer_config",
        # of Mamba layers: off (`groups`)
        "mamba_config",
        # resolved into other configs
        "optimization_level",
        "performance_mode",
        # moved or told to others, not computed with
        "aux_output_config",
        "ec_manager_config",
        "ec_transfer_config",
        "kv_events_config",
        "kv_transfer_config",
        "logging_config",
        "observability_config",
        "profiler_config",
        "instance_id",
        "shutdown_timeout",
    }
)
"""Whole parts of VllmConfig that no section of the identity looks at."""

MODEL_LEFT_OUT = frozenset(
    {
        # names, paths, credentials
        "model",
        "model_weights",
        "tokenizer",
        "tokenizer_mode",
        "tokenizer_revision",
        "hf_config_path",
        "hf_token",
        "revision",
        "code_revision",
        "served_model_name",
        "config_format",
        "allowed_local_media_path",
        "allowed_media_domains",
        # told elsewhere
        "hf_config",  # section hf
        "hf_text_config",  # section hf_text, where it is not part of hf_config
        "hf_overrides",  # applied to hf_config
        "runner",  # resolved: runner_type
        "convert",  # resolved: convert_type
        "multimodal_config",  # section multimodal
        "max_model_len",  # only where it selects rope values
        "spec_target_max_model_len",
        "trust_remote_code",  # section class
        "seed",  # part of the digest of dummy weights; else it only seeds sampling
        "allow_deprecated_quantization",  # only whether the start is refused
        # after the KV
        "generation_config",
        "override_generation_config",
        "logits_processors",
        "io_processor_plugin",
        "pooler_config",
        "max_logprobs",
        "logprobs_mode",
        "use_fp64_gumbel",
        "return_sampling_mask",
        "enable_trace_replay",
        "skip_tokenizer_init",
        "enable_prompt_embeds",  # such requests are not cached
        "renderer_num_workers",
        "disable_cascade_attn",  # vLLM: has no effect any more
        # where memory comes from
        "enable_sleep_mode",
        "sleep_preserve_parameter_names",
        "sleep_mode_backend",
        "sleep_mode_offload_cudagraph",
        "enable_nccl_comm_suspend",
        "enable_cumem_allocator",
    }
)
CACHE_LEFT_OUT = frozenset(
    {
        # told by the groups' specs, as resolved
        "block_size",
        "user_specified_block_size",
        "kv_cache_layout",
        "sliding_window",
        "is_attention_free",
        "effective_attention_block_size",
        "_block_size_resolved",
        # how much, and how vLLM's own prefix cache finds it
        "gpu_memory_utilization",
        "num_gpu_blocks",
        "num_gpu_blocks_override",
        "num_cpu_blocks",
        "kv_cache_memory_bytes",
        "kv_cache_size_tokens",
        "kv_cache_max_concurrency",
        "enable_prefix_caching",
        "prefix_caching_hash_algo",
        "prefix_cache_retention_interval",
        "prefix_match_unit",
        "hash_block_size",
        "cache_hit_alignment_tokens",
        "kv_offloading_size",
        "kv_offloading_backend",
        # of Mamba layers: such models are off (`groups`)
        "mamba_page_size_padded",
        "mamba_block_size",
        "mamba_cache_dtype",
        "mamba_ssm_cache_dtype",
        "mamba_cache_mode",
        "enable_mamba_shared_prefix_checkpoint",
        "replayssm_buffer_len",
        "use_replayssm",
        "use_kda_recoverssm",
    }
)
PARALLEL_LEFT_OUT = frozenset(
    {
        # which of several equal engines this is, and how they find each other
        "rank",
        "node_rank",
        "data_parallel_size",  # only for mixtures of experts, as experts_over
        "data_parallel_rank",
        "data_parallel_rank_local",
        "data_parallel_index",
        "data_parallel_size_local",
        "data_parallel_backend",
        "data_parallel_external_lb",
        "data_parallel_hybrid_lb",
        "data_parallel_master_ip",
        "data_parallel_master_port",
        "data_parallel_rpc_port",
        "dp_sync_interval",
        "disable_nccl_for_dp_synchronization",
        "elastic_ep_max_dp_size",
        "_data_parallel_master_port_list",
        "_coord_store_port",
        "_api_process_count",
        "_api_process_rank",
        "master_addr",
        "master_port",
        "nnodes",
        "distributed_timeout_seconds",
        "cpu_distributed_timeout_seconds",
        "enable_fault_tolerance",
        "fault_tolerance_config",
        # how its processes are started, placed and fed
        "distributed_executor_backend",
        "ray_workers_use_nsight",
        "ray_runtime_env",
        "placement_group",
        "numa_bind",
        "numa_bind_nodes",
        "numa_bind_cpus",
        "assigned_physical_gpu_ids",
        "max_parallel_loading_workers",
        "enable_ep_weight_filter",
        "enable_shm_tensor_arena",
        # told by others, or after the KV
        "world_size",
        "eplb_config",  # when experts move, not what they compute
        "enable_batch_sharded_sampling",
        "_allow_auto_resolve_cp_interleave_size",
    }
)
COMPILATION_LEFT_OUT = frozenset(
    {
        # sizes of batches and graphs
        "compile_sizes",
        "compile_ranges_endpoints",
        "cudagraph_capture_sizes",
        "max_cudagraph_capture_size",
        "encoder_cudagraph_token_budgets",
        "encoder_cudagraph_max_vision_items_per_batch",
        "encoder_cudagraph_max_frames_per_batch",
        "decoder_replay_cudagraph_capture_sizes",
        "decoder_replay_trim_threshold",
        # caches, warm-up, debugging
        "debug_dump_path",
        "cache_dir",
        "local_cache_dir",
        "compile_cache_save_format",
        "cudagraph_num_of_warmups",
        "cudagraph_copy_inputs",
        # filled in while the engine starts
        "enabled_custom_ops",
        "disabled_custom_ops",
        "traced_files",
        "compilation_time",
        "encoder_compilation_time",
        "static_forward_context",
        "static_all_moe_layers",
    }
)
ATTENTION_LEFT_OUT = frozenset({"sparse_mla_prefill_workspace_factor"})  # the size of a buffer
KERNEL_LEFT_OUT = frozenset({"enable_cutedsl_warmup", "enable_jit_warmup"})
LORA_LEFT_OUT = frozenset(
    {
        "max_loras",
        "max_cpu_loras",
        "specialize_active_lora",
        "default_mm_loras",  # names adapters: each request's adapter counts by its content
        "max_lora_cls_labels",
    }
)
SPECULATIVE_LEFT_OUT = frozenset(
    {
        # paths, and what section draft tells
        "model",
        "revision",
        "code_revision",
        "target_model_config",
        "target_parallel_config",
        "draft_model_config",
        "draft_parallel_config",
        "draft_load_config",
        "max_model_len",
        "tensor_parallel_size",
        # which drafts are taken: the KV of a token does not depend on who guessed it
        "rejection_sample_method",
        "synthetic_acceptance_rates",
        "synthetic_acceptance_length",
    }
)
MULTIMODAL_LEFT_OUT = frozenset(
    {
        "limit_per_prompt",
        "enable_mm_embeds",
        "mm_processor_cache_gb",
        "mm_processor_cache_type",
        "mm_shm_cache_max_object_size_mb",
        "interleave_mm_strings",
        "skip_mm_profiling",
        "mm_tensor_ipc",
        "mm_ipc_gpu_memory_gb",
        "mm_encoder_fp8_scale_save_path",
        "mm_encoder_fp8_scale_save_margin",
    }
)

ENV_LEFT_OUT_PREFIXES = (
    "MOONCAKE_",
    "RAY_",
    "VLLM_BUILD_",
    "VLLM_DP_",
    "VLLM_EC_",
    "VLLM_GPT_OSS_",
    "VLLM_KV_",  # the layout counts as resolved
    "VLLM_LOG_",
    "VLLM_LORA_RESOLVER_",
    "VLLM_MAX_",
    "VLLM_MOONCAKE_",
    "VLLM_NIXL_",
    "VLLM_P2P_",
    "VLLM_RAY_",
    "VLLM_TOOL_",
    "VLLM_USE_RAY_",
    "VLLM_USE_RUST_",
    "VLLM_WEIGHT_OFFLOADING_",
    "VLLM_XGRAMMAR_",
)
ENV_LEFT_OUT_SUFFIXES = ("_DIR", "_PATH", "_TIMEOUT", "_TIMEOUT_S", "_TIMEOUT_SECONDS")
ENV_LEFT_OUT = frozenset(
    {
        # build, launch and place of processes
        "CMAKE_BUILD_TYPE",
        "CUDA_HOME",
        "NVCC_THREADS",
        "VERBOSE",
        "VLLM_COMPILE_CACHE_SAVE_FORMAT",
        "VLLM_CPU_NUM_OF_RESERVED_CPU",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_DISABLE_COMPILE_CACHE",
        "VLLM_DOCKER_BUILD_CONTEXT",
        "VLLM_ELASTIC_EP_DRAIN_REQUESTS",
        "VLLM_FASTSAFETENSORS_QUEUE_SIZE",
        "VLLM_GPU_NIC_PCIE_MAPPING",
        "VLLM_IMAGE_TAG",
        "VLLM_LOOPBACK_IP",
        "VLLM_MAIN_CUDA_VERSION",
        "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS",
        "VLLM_NIC_SELECTION_VARS",
        "VLLM_PLUGINS",
        "VLLM_PROCESS_NAME_PREFIX",
        "VLLM_SKIP_P2P_CHECK",
        "VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX",
        "VLLM_TARGET_DEVICE",
        "VLLM_USE_PRECOMPILED",
        "VLLM_USE_PRECOMPILED_RUST",
        "VLLM_USE_SIMPLE_KV_OFFLOAD",
        "VLLM_WSL2_ENABLE_PIN_MEMORY",
        # the front end, sampling, logs, debugging
        "VLLM_ALLOW_INSECURE_SERIALIZATION",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        "VLLM_COMPUTE_NANS_IN_LOGITS",
        "VLLM_CONFIGURE_LOGGING",
        "VLLM_CUSTOM_SCOPES_FOR_PROFILING",
        "VLLM_DEBUG_MFU_METRICS",
        "VLLM_DEBUG_WORKSPACE",
        "VLLM_DISABLE_LOG_LOGO",
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",
        "VLLM_ENABLE_COHERE_API",
        "VLLM_ENABLE_RESPONSES_API_STORE",
        "VLLM_ENFORCE_STRICT_TOOL_CALLING",
        "VLLM_GC_DEBUG",
        "VLLM_MQ_MAX_CHUNK_BYTES_MB",
        "VLLM_MSGPACK_ZERO_COPY_THRESHOLD",
        "VLLM_NVTX_SCOPES_FOR_PROFILING",
        "VLLM_RAISE_ON_LOGIT_NANS",
        "VLLM_SYSTEM_START_DATE",
        "VLLM_TRACE_FUNCTION",
        "VLLM_USAGE_SOURCE",
        "VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT",
        "VLLM_USE_FASTOKENS",
        "VLLM_USE_FLASHINFER_SAMPLER",
        "VLLM_USE_SPINLOOP_EXT",
        "VLLM_V1_USE_OUTLINES_CACHE",
        "VLLM_XPU_USE_SAMPLER_KERNEL",
    }
)
"""Of the variables that vLLM counts as changing compiled code: those that cannot change KV."""
