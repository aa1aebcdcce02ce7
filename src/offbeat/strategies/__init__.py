"""One short file a published method: it reads like its paper and binds policy and numerics to the runtime."""
