"""Messages to text, as the model's chat template has it."""
