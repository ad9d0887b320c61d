"""Adapters (LoRA) of models, read from the folders that PEFT writes."""
