"""Programs a person runs from the checkout: `python -m scripts.NAME`."""
