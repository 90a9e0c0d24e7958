"""The node with a file of parameters: `ros2 launch legato_ros legato.launch.py params:=FILE`."""

from pathlib import Path

from ament_index_python.packages import get_package_share_directory
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import LifecycleNode
from launch_ros.parameter_descriptions import ParameterValue

EXAMPLE = Path(get_package_share_directory("legato_ros"), "config", "legato.yaml")
ARGUMENTS = {
    "params": (str(EXAMPLE), "YAML file of parameters"),
    "name": ("legato", "name of the node"),
    "namespace": ("", "namespace of the node and of its relative topics"),
    "use_sim_time": ("false", "take the time from /clock"),
    "autostart": ("true", "configure and activate at once; false: by a lifecycle manager"),
}


def generate_launch_description() -> LaunchDescription:
    given = {name: LaunchConfiguration(name) for name in ARGUMENTS}
    flags = {
        name: ParameterValue(given[name], value_type=bool) for name in ("use_sim_time", "autostart")
    }
    return LaunchDescription(
        [
            *(
                DeclareLaunchArgument(name, default_value=default, description=description)
                for name, (default, description) in ARGUMENTS.items()
            ),
            LifecycleNode(
                package="legato_ros",
                executable="legato_node",
                name=given["name"],
                namespace=given["namespace"],
                parameters=[given["params"], flags],
                output="screen",
                emulate_tty=True,
            ),
        ]
    )
