"""The preprocessing of each family of models, without torch: turns pixels and samples into inputs of encoders."""
