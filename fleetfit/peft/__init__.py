"""Fine-tuning modes, one per file: the trained part of a model, and the modules that are added. For any method."""
