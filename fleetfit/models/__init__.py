"""Models: one file per family, its sizes as rows of a table in it.

Families share `family` (stem, blocks and classifiers; layers for images), `transformer` (for tokens) and `pretrained`
(Hugging Face's folders). `selective_scan` is Vision Mamba's; `ree` puts one exit onto any of them.
"""
