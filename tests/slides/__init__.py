"""The decks, their code, figures and claims."""
