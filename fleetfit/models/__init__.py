"""Models: one file per family, its sizes as rows of a table in it.

What families share: `blocks` (for images), `transformer` (for tokens), `pretrained` (Hugging Face's folders),
`selective_scan` (Vision Mamba's). `ree` puts one exit onto any of them.
"""
