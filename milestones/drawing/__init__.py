"""Pictures: SVG, and what the pictures of the course and of the slides share."""
