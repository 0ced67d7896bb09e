"""``python -m bullet_graph``: the command line without its installed script."""

from bullet_graph.cli.main import main

if __name__ == "__main__":
    main()
