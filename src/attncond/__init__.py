"""Make the attention of any PyTorch transformer well conditioned."""
