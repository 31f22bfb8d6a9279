"""vLLM behind the port of an engine: it generates, and loads weights completely or serves nothing.

    actor process                     engine core (vLLM)        worker, one a device (vLLM)
    VllmEngineServer  fence, acks
    VllmEngine        requests ------> scheduler --------------> model
    WeightUpdates     transaction ---> pause, resume
    StagingArea       shared memory ---------------------------> SharedChunks: digests
                                                                 ShmTransferEngine: load
    Verdicts          pipe <------------------------------------ ShadowModel: layers not in use yet
                                                                 WorkerExtension: abort

These modules run inside vLLM's processes and import vllm at their top: ``transfer_engine``,
``worker_fetch``, ``read_back`` and ``worker_extension``. So do ``imported_names`` and
``labelled_llm``. The others import them when an engine is created, so a driver without vLLM can set
up a run.
"""
