"""Fine-tuning modes, one per file: what of a model is trained, and what is put in. They go with any method."""
