# The part of Homebrew's formula language that packaging/homebrew/mlx-paged.rb uses, without Homebrew.
# Loads a formula, runs its methods with recorded commands, and prints JSON. Names that it does not know
# end it with an error.
#
#   ruby homebrew.rb FORMULA FOLDER COMMAND
#
# FOLDER becomes the build folder, the keg and etc; COMMAND stands for the installed program in `test do`.
require "json"
require "fileutils"
require "pathname"

FOLDER = Pathname(ARGV[1])
CALLS = []

class Pathname
  def install(*files)
    mkpath
    files.flatten.each { |file| FileUtils.mv(file, self/File.basename(file)) }
  end

  def install_symlink(target)
    mkpath
    File.symlink(target, self/File.basename(target))
  end
end

module Language
  module Python
    module Virtualenv
      def virtualenv_create(folder, python)
        CALLS << ["virtualenv_create", folder.to_s, python]
      end
    end
  end
end

# An artifact with a URL and a checksum, staged as an empty file of its name.
class Artifact
  attr_reader :name

  def initialize(name, &block)
    @name = name
    instance_eval(&block) if block
  end

  def url(value = nil, using: nil)
    return @url unless value

    @url = value
    @using = using
  end

  def sha256(value = nil)
    value ? @sha256 = value : @sha256
  end

  def stage(folder = FOLDER/"stage"/@name)
    folder.mkpath
    Dir.chdir(folder) do
      File.write(File.basename(@url), "")
      yield
    end
  end

  def to_h
    { name: @name, url: @url, using: @using, sha256: @sha256 }
  end
end

class Service
  attr_reader :settings

  def initialize(formula, &block)
    @formula = formula
    @settings = {}
    instance_eval(&block)
  end

  %w[opt_bin var etc].each { |name| define_method(name) { @formula.public_send(name) } }
  %w[run keep_alive working_dir log_path error_log_path environment_variables].each do |name|
    define_method(name) { |value| @settings[name] = value }
  end
end

class Formula
  class << self
    attr_reader :fields, :resources, :stable, :service_block, :test_block

    def inherited(formula)
      super
      formula.instance_eval do
        @fields = Hash.new { |hash, key| hash[key] = [] }
        @resources = []
        @stable = Artifact.new("mlx-paged")
      end
    end

    %w[desc homepage version license depends_on preserve_rpath].each do |name|
      define_method(name) { |*values| @fields[name] << (values.length > 1 ? values : values.first) }
    end

    def url(...) = @stable.url(...)

    def sha256(value) = @stable.sha256(value)

    def resource(name, &block) = @resources << Artifact.new(name, &block)

    def service(&block) = @service_block = block

    def test(&block) = @test_block = block
  end

  %w[libexec etc var].each { |name| define_method(name) { FOLDER/name } }

  def bin = FOLDER/"bin"

  def opt_bin = bin

  def buildpath = FOLDER/"build"

  def resources = self.class.resources

  def version = self.class.fields["version"].first

  def system(*words)
    CALLS << ["system", *words.map(&:to_s)]
  end

  def shell_output(command)
    output = `#{command}`
    raise "#{command} ended with #{$?.exitstatus}" unless $?.success?

    output
  end

  def assert_match(expected, text)
    raise "#{text} has no #{expected}" unless expected.is_a?(Regexp) ? expected.match?(text) : text.include?(expected)
  end
end

load ARGV[0]
formula = ObjectSpace.each_object(Class).find { |type| type < Formula }
built = formula.new
formula.stable.stage(built.buildpath) { built.install }
installed = built.bin.children.to_h { |path| [path.basename.to_s, File.readlink(path)] }
built.bin.children.each(&:unlink)
File.symlink(ARGV[2], built.bin/"mlx-paged")
Dir.chdir(FOLDER) { built.instance_eval(&formula.test_block) }
puts JSON.generate(
  name: formula.name, fields: formula.fields, stable: formula.stable.to_h, calls: CALLS, installed: installed,
  resources: formula.resources.map(&:to_h), service: Service.new(built, &formula.service_block).settings,
  caveats: built.caveats
)
