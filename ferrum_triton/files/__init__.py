"""Readers of the files a model ships in: weights, tokenizer and chat template.

Everything here treats a file as hostile: sizes are checked before they are used, and whatever is
wrong with a file ends in :class:`~ferrum_triton.errors.FileError`.
"""
