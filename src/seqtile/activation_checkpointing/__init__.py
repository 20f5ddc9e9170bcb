"""What an activation checkpoint keeps and where: attention's output, and inputs of layers on the host."""
