"""Other ways to call flashgen: flex_attention, transformers, sequences on several ranks."""
