"""The example's application as the demo serves it: with two routes more."""

from __future__ import annotations

import click

from example_app import create_app
from example_app.demo.routes import demo_blueprint
from example_app.serving import serve


@click.command()
@click.option("--port", default=0, help="0: any free one.")
@click.option("--until-eof", is_flag=True, help="End when standard input ends.")
def main(*, port: int, until_eof: bool) -> None:
    """Serve the application with the demo's own routes."""
    app = create_app()
    app.register_blueprint(demo_blueprint())
    serve(app, port, until_eof=until_eof)


if __name__ == "__main__":
    main()
