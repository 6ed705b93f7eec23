"""Makes the embedded vision model: pictures, questions, training, conversion, evaluation, card."""
