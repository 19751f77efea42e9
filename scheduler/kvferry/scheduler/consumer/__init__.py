"""The consuming side: loads of prompts that were prefilled elsewhere."""
