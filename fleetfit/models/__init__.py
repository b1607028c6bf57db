"""Models: one file per family, with its sizes as rows of a table; a new one needs a row in `fleetfit/names.py`.

Families share `family` (stem, blocks and classifiers; layers for images), `transformer` (for tokens) and `pretrained`
(Hugging Face's folders). `selective_scan` belongs to Vision Mamba, and `ree` adds one recurrent exit to any family.
"""
