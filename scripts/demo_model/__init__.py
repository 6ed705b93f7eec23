"""Pipeline that made the embedded model: corpus, tasks, training, conversion, evaluation, card."""
