"""Built-in loggers: one short file each. They are informed of a run through the hooks of its life (``hookspecs``)."""
