"""vLLM behind the port of an engine: it generates, and takes weights wholly or serves nothing.

    actor process                     engine core (vLLM)        worker, one a device (vLLM)
    VllmEngineServer  fence, acks
    VllmEngine        requests ------> scheduler --------------> model
    WeightUpdates     transaction ---> pause, resume
    StagingArea       shared memory ---------------------------> SharedChunks: digests
                                                                 ShmTransferEngine: load
    Verdicts          pipe <------------------------------------ ShadowModel: new layers beside the old
                                                                 WorkerExtension: abort

These modules import vllm at their top: ``transfer_engine``, ``shadow_model``, ``shared_chunks`` and
``worker_extension``, which run inside vLLM's processes, and ``imported_names`` and ``labelled_llm``.
The others import them when an engine is created, so that a driver without vLLM can set up a run.
"""
