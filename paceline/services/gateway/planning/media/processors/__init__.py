"""The preprocessing of each family of models, without torch: from pixels and samples to the inputs of encoders."""
