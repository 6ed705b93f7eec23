"""GGUF: reads model files of llama.cpp's format into MLX arrays, a config and a tokenizer.

Layers. Each one imports only those listed above it:

- `reader`: the bytes of a file: metadata and tensors of blocks.
- `formats`: blocks as MLX's quantized or plain arrays.
- `architectures`: metadata as a ``config.json``, and GGUF's tensor names as mlx-lm's.
- `tokenizer`: the vocabulary as a tokenizer of Hugging Face's library.
- `checkpoint`: all of it for one file. `mlx_paged.model.gguf_loading` makes the model.
"""
