"""The lectures: one deck a milestone and an opening one, built from Markdown by `make slides`."""
