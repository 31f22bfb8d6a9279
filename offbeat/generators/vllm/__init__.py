"""vLLM behind the port of an engine: it generates, and takes weights wholly or serves nothing.

    actor process                     engine core (vLLM)        worker, one a device (vLLM)
    VllmEngineActor   fence, acks
    VllmEngine        requests ------> scheduler --------------> model
    WeightUpdates     transaction ---> pause, resume
    StagingArea       shared memory ---------------------------> ShmTransferEngine: digests, load
    Verdicts          pipe <------------------------------------ Twin: new layers beside the old
                                                                 WorkerExtension: abort

Modules that run inside vLLM's processes, and only those, import vllm at their top:
``transfer_engine``, ``twin`` and ``worker_extension``. The others import it when an engine is made, so that a
driver without it can set a run up.
"""
