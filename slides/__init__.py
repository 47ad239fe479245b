"""The lectures: an opening deck and one per milestone. `make slides` builds them from Markdown."""
