"""Image classifiers, each built as ``Model(in_channels, image_size, num_classes, **options)``."""
