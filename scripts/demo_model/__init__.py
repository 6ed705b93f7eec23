"""How the embedded model was trained: corpus, tasks, training, conversion, evaluation, card."""
