"""Folders as Hugging Face's libraries write them: config.json, weights in safetensors, a tokenizer or image processor.

`load_hub_folder` begins. Nothing is fetched, and no code of a folder's is run.
"""
