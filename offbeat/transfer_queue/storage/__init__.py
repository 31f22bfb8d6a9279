"""Where payloads rest: in this process, in memory shared on the node, or in Ray's object store."""
