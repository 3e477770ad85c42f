"""What commands write from templates."""
