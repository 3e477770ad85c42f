"""The HTML and CSS of pages."""
