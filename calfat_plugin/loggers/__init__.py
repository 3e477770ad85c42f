"""Built-in loggers: one short file each. They hear of a run through the hooks of its life (``hookspecs``)."""
